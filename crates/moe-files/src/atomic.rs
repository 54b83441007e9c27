//! An output file that appears complete or not at all.

use std::collections::HashSet;
use std::fs::File;
use std::io::{self, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::{LazyLock, Mutex, PoisonError};

use tempfile::{NamedTempFile, TempPath};

use crate::error::Error;
use crate::temporary::{Registry, registry};
use crate::transaction::Transaction;
use crate::{check_inputs, inputs, parent_of, stale};

/// Bytes of an output's name that its temporary name repeats; a name has 255 at most.
const MAX_NAME: usize = 200;
/// How often another process may take a new temporary file for a stale one.
const MAX_ATTEMPTS: usize = 16;

/// A file under a temporary name in the directory of its path. [`AtomicFile::commit`] renames it. Dropped before, it is
/// removed, and the path is as it was.
///
/// The temporary name is random and created exclusively, so that no link is followed and no file is overwritten.
#[derive(Debug)]
pub struct AtomicFile {
    file: File,
    pending: Pending,
    /// Whether all of it is on the disk.
    is_synced: bool,
}

impl AtomicFile {
    /// Creates the temporary file for `path`, whose directory must exist. Temporary files that killed processes left in
    /// that directory are removed first.
    ///
    /// # Errors
    /// [`Error::Exists`] where `path` exists, unless `replace`; [`Error::IsInput`] and [`Error::InsideInput`] for a path
    /// that [`inputs`] protects; [`Error::Io`].
    pub fn create(path: &Path, replace: bool) -> Result<Self, Error> {
        check_path(path, replace)?;
        let dir = parent_of(path);
        remove_stale_once(dir);
        let mut registry = registry();
        let (file, temporary) = create_locked(dir, path, |path| {
            let mut options = File::options();
            options.read(true).write(true).create_new(true).open(path)
        })
        .map_err(Error::io("create", path))?
        .into_parts();
        registry.files.insert(temporary.to_path_buf());
        drop(registry);
        Ok(Self {
            file,
            pending: Pending {
                temporary: Some(temporary),
                path: path.to_owned(),
                replace,
            },
            is_synced: false,
        })
    }

    /// The path of the output.
    pub fn path(&self) -> &Path {
        &self.pending.path
    }

    /// The open file.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// A second handle of the open file, which stays valid after [`AtomicFile::commit`].
    ///
    /// # Errors
    /// The system has no file descriptor left.
    pub fn try_clone(&self) -> Result<File, Error> {
        self.file
            .try_clone()
            .map_err(Error::io("open", self.path()))
    }

    /// Brings the contents to the disk before the file is renamed. Nothing is to be written in between.
    ///
    /// # Errors
    /// The disk is full or fails.
    pub fn sync(&mut self) -> Result<(), Error> {
        self.file
            .sync_all()
            .map_err(Error::io("write", &self.pending.path))?;
        self.is_synced = true;
        Ok(())
    }

    pub(crate) fn sync_if_it_replaces(&mut self) -> Result<(), Error> {
        if self.pending.replaces() && !self.is_synced {
            self.sync()
        } else {
            Ok(())
        }
    }

    pub(crate) fn into_parts(self) -> (File, Pending) {
        (self.file, self.pending)
    }

    /// Renames the file to its path. A file that is replaced stays until the new contents are on the disk.
    ///
    /// # Errors
    /// [`Error::Exists`] where `path` appeared meanwhile and may not be replaced; [`Error::Truncated`], see
    /// [`check_inputs`]; [`Error::Io`]. The path is as it was.
    pub fn commit(self) -> Result<(), Error> {
        commit_all(vec![self])
    }

    /// As [`AtomicFile::commit`], also after an input was truncated: for a file that does not depend on it.
    ///
    /// # Errors
    /// As [`AtomicFile::commit`].
    pub fn commit_unchecked(self) -> Result<(), Error> {
        let mut transaction = Transaction::default();
        transaction.rename(self)?;
        transaction.finish()
    }
}

impl Write for AtomicFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl Seek for AtomicFile {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.file.seek(to)
    }
}

/// Renames several files to their paths, in order.
///
/// # Errors
/// As [`AtomicFile::commit`]. Then all paths are as they were, see [`Transaction`].
pub fn commit_all(files: Vec<AtomicFile>) -> Result<(), Error> {
    commit_and_remove(files, &[])
}

/// As [`commit_all`], and removes files of an earlier output, where they exist.
///
/// # Errors
/// As [`AtomicFile::commit`] and [`Transaction::remove`]. Then all paths are as they were, see [`Transaction`].
pub fn commit_and_remove(files: Vec<AtomicFile>, removed: &[PathBuf]) -> Result<(), Error> {
    check_inputs()?;
    let mut pending = Vec::with_capacity(files.len());
    let mut open = Vec::with_capacity(files.len());
    for mut file in files {
        file.sync_if_it_replaces()?;
        let (file, one) = file.into_parts();
        // Open, so that the temporary file stays locked until it is renamed.
        open.push(file);
        pending.push(one);
    }
    rename_all(pending, removed)
}

/// A complete file under its temporary name.
#[derive(Debug)]
pub(crate) struct Pending {
    /// `None` once it is renamed.
    pub(crate) temporary: Option<TempPath>,
    pub(crate) path: PathBuf,
    pub(crate) replace: bool,
}

impl Pending {
    /// Whether a file lies at the path, which may be replaced.
    pub(crate) fn replaces(&self) -> bool {
        self.replace && self.path.symlink_metadata().is_ok()
    }

    pub(crate) fn rename(&mut self, registry: &mut Registry) -> Result<(), Error> {
        let Some(temporary) = self.temporary.take() else {
            return Ok(());
        };
        let name = temporary.to_path_buf();
        let renamed = if self.replace {
            temporary.persist(&self.path)
        } else {
            temporary.persist_noclobber(&self.path)
        };
        registry.files.remove(&name);
        renamed.map_err(|failure| match failure.error.kind() {
            io::ErrorKind::AlreadyExists if !self.replace => Error::Exists {
                path: self.path.clone(),
            },
            _ => Error::io("write", &self.path)(failure.error),
        })
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if let Some(temporary) = self.temporary.take() {
            registry().files.remove(&*temporary);
        }
    }
}

/// Renames all files and removes the paths `removed`, or changes nothing.
pub(crate) fn rename_all(mut files: Vec<Pending>, removed: &[PathBuf]) -> Result<(), Error> {
    let mut transaction = Transaction::default();
    // No signal removes temporary files in between.
    let mut registry = registry();
    let changed = files
        .iter_mut()
        .try_for_each(|file| transaction.rename_pending(file, &mut registry))
        .and_then(|()| {
            let mut removed = removed.iter();
            removed.try_for_each(|path| transaction.remove_locked(path, &mut registry))
        });
    if changed.is_err() {
        transaction.undo(&mut registry);
    }
    drop(registry);
    changed?;
    transaction.finish()
}

/// Refuses an output that exists or that is protected.
pub(crate) fn check_path(path: &Path, replace: bool) -> Result<(), Error> {
    inputs::check_output(path)?;
    if !replace && path.symlink_metadata().is_ok() {
        return Err(Error::Exists {
            path: path.to_owned(),
        });
    }
    Ok(())
}

/// Calls `make` with the names of temporary files for `path`.
fn temporary_names<T>(path: &Path, make: impl FnOnce(&tempfile::Builder<'_, '_>) -> T) -> T {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let is_boundary = |&end: &usize| name.is_char_boundary(end);
    let end = (0..=MAX_NAME.min(name.len()))
        .rev()
        .find(is_boundary)
        .unwrap_or(0);
    let prefix = format!(".{}.", &name[..end]);
    let mut builder = tempfile::Builder::new();
    builder
        .prefix(&prefix)
        .suffix(stale::SUFFIX)
        .rand_bytes(stale::N_RANDOM);
    make(&builder)
}

/// Creates a temporary file or directory for `path` in `dir` with `create` and locks it.
pub(crate) fn create_locked(
    dir: &Path,
    path: &Path,
    create: impl Fn(&Path) -> io::Result<File>,
) -> io::Result<NamedTempFile<File>> {
    temporary_names(path, |builder| {
        for _ in 0..MAX_ATTEMPTS {
            let file = builder.make_in(dir, &create)?;
            if stale::lock(file.as_file())? {
                return Ok(file);
            }
        }
        Err(io::Error::other(
            "its temporary file was removed by another process",
        ))
    })
}

/// Removes stale temporary files of a directory at the first output that this process writes there.
pub(crate) fn remove_stale_once(dir: &Path) {
    static SEEN: LazyLock<Mutex<HashSet<PathBuf>>> = LazyLock::new(Mutex::default);
    let dir = dir.canonicalize().unwrap_or_else(|_| dir.to_owned());
    let is_new = SEEN
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .insert(dir.clone());
    if is_new {
        stale::remove(&dir);
    }
}
