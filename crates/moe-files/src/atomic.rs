//! An output file that appears complete or not at all.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{self, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::{LazyLock, Mutex, PoisonError};

use tempfile::{NamedTempFile, TempPath};

use crate::directory_lock::lock_directories;
use crate::error::Error;
use crate::stale::{self, temporary_names};
use crate::temporary::{Registry, registry};
use crate::transaction::Transaction;
use crate::{check_inputs, inputs, parent_of};

/// Maximum number of temporary files to create for one output. Another process may remove a new one as stale.
const MAX_ATTEMPTS: usize = 16;

/// An output file under a temporary name in the directory of its path.
///
/// [`AtomicFile::commit`] renames it to its path. If it is dropped without a commit, the temporary file is removed and the
/// path is unchanged. The temporary name is random and created exclusively: no link is followed and no file is overwritten.
#[derive(Debug)]
pub struct AtomicFile {
    file: File,
    pending: Pending,
    /// Whether the contents are synced to the disk.
    is_synced: bool,
}

impl AtomicFile {
    /// Creates the temporary file for `path`, whose directory must exist. `replace` allows the replacement of an existing file.
    ///
    /// Removes temporary files that killed processes left in that directory.
    ///
    /// # Errors
    /// [`Error::IsLink`] if `path` is a symbolic link; [`Error::Exists`] if it exists and `replace` is false;
    /// [`Error::IsInput`] or [`Error::InsideInput`] if [`inputs`] protects it; [`Error::Io`].
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

    /// Returns a second handle of the open file, which stays valid after [`AtomicFile::commit`].
    ///
    /// # Errors
    /// The system has no free file descriptor.
    pub fn try_clone(&self) -> Result<File, Error> {
        self.file
            .try_clone()
            .map_err(Error::io("open", self.path()))
    }

    /// Syncs the contents to the disk before the file is renamed. Do not write to the file after this call.
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

    /// Renames the file to its path. An existing file is replaced only after the new contents are on the disk.
    ///
    /// # Errors
    /// [`Error::Exists`] if a file was created at `path` meanwhile and may not be replaced, [`Error::IsLink`] if a symbolic link
    /// was; [`Error::Truncated`], see [`check_inputs`]; [`Error::Io`]. After an error the path is unchanged.
    pub fn commit(self) -> Result<(), Error> {
        commit_all(vec![self])
    }

    /// Like [`AtomicFile::commit`], but ignores truncated inputs. For a file that does not depend on the inputs.
    ///
    /// # Errors
    /// The errors of [`AtomicFile::commit`], except [`Error::Truncated`].
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
/// The errors of [`AtomicFile::commit`]. After an error all paths are unchanged, see [`Transaction`].
pub fn commit_all(files: Vec<AtomicFile>) -> Result<(), Error> {
    commit_and_remove(files, &[])
}

/// Like [`commit_all`], and removes those paths of `removed` that exist: files of an earlier output.
///
/// # Errors
/// The errors of [`AtomicFile::commit`] and [`Transaction::remove`]. After an error all paths are unchanged, see
/// [`Transaction`].
pub fn commit_and_remove(files: Vec<AtomicFile>, removed: &[PathBuf]) -> Result<(), Error> {
    check_inputs()?;
    let mut pending = Vec::with_capacity(files.len());
    let mut open = Vec::with_capacity(files.len());
    for mut file in files {
        file.sync_if_it_replaces()?;
        let (file, unrenamed) = file.into_parts();
        // An open file keeps its lock until it is renamed.
        open.push(file);
        pending.push(unrenamed);
    }
    rename_all(pending, removed)
}

/// A complete file that still has its temporary name.
#[derive(Debug)]
pub(crate) struct Pending {
    /// `None` after the file is renamed.
    pub(crate) temporary: Option<TempPath>,
    pub(crate) path: PathBuf,
    pub(crate) replace: bool,
}

impl Pending {
    /// Whether the rename replaces an existing file.
    pub(crate) fn replaces(&self) -> bool {
        self.replace && self.path.symlink_metadata().is_ok()
    }

    pub(crate) fn rename(&mut self, registry: &mut Registry) -> Result<(), Error> {
        let Some(temporary) = self.temporary.take() else {
            return Ok(());
        };
        let name = temporary.to_path_buf();
        if self.replace
            && let Err(error) = check_link(&self.path)
        {
            registry.files.remove(&name);
            return Err(error);
        }
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

/// Renames all files and removes the paths in `removed`, or changes nothing.
pub(crate) fn rename_all(mut files: Vec<Pending>, removed: &[PathBuf]) -> Result<(), Error> {
    let paths = files.iter().map(|file| &*file.path);
    let paths = paths.chain(removed.iter().map(|path| &**path));
    // One output is complete by itself.
    let is_group = files.len() + removed.len() > 1;
    let _locks = is_group.then(|| lock_directories(paths));
    let mut transaction = Transaction::default();
    // Held to the end: the thread that handles signals removes temporary files under this lock.
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

/// Rejects an output file that is a symbolic link, wherever it points. A link in a parent directory is allowed.
///
/// # Errors
/// [`Error::IsLink`].
pub fn check_link(path: &Path) -> Result<(), Error> {
    if path.is_symlink() {
        return Err(Error::IsLink {
            path: path.to_owned(),
        });
    }
    Ok(())
}

/// Rejects an output that is a symbolic link, that exists, unless `replace`, or that [`inputs`] protects.
pub(crate) fn check_path(path: &Path, replace: bool) -> Result<(), Error> {
    inputs::check_output(path)?;
    check_link(path)?;
    if !replace && path.symlink_metadata().is_ok() {
        return Err(Error::Exists {
            path: path.to_owned(),
        });
    }
    Ok(())
}

/// Creates a temporary file or directory for `path` in `dir` by `create`, and locks it.
fn create_locked(
    dir: &Path,
    path: &Path,
    create: impl Fn(&Path) -> io::Result<File>,
) -> io::Result<NamedTempFile<File>> {
    temporary_names(path, |builder| {
        for _ in 0..MAX_ATTEMPTS {
            let file = match builder.make_in(dir, &create) {
                // `create` makes a directory and opens it; another process removed it in between.
                Err(error) if error.kind() == io::ErrorKind::NotFound && dir.is_dir() => continue,
                result => result?,
            };
            if stale::lock(file.as_file())? {
                return Ok(file);
            }
        }
        Err(io::Error::other(
            "a temporary file cannot be created next to it, or another process removes it",
        ))
    })
}

/// Creates a temporary directory in `parent` and adds it to `registry`. Returns its lock, and its path.
pub(crate) fn create_directory(
    parent: &Path,
    name: &str,
    registry: &mut Registry,
) -> io::Result<(File, PathBuf)> {
    let (lock, temporary) = create_locked(parent, Path::new(name), |path| {
        fs::create_dir(path)?;
        File::open(path)
    })?
    .into_parts();
    // A `TempPath` removes files only.
    let path = temporary.keep().map_err(|failure| failure.error)?;
    registry.trees.insert(path.clone());
    Ok((lock, path))
}

/// Removes stale temporary files of a directory, once in the life of the process.
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

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn retries_if_another_process_removes_a_new_directory_before_it_is_opened() {
        let parent = tempfile::tempdir().unwrap();
        let attempts = Cell::new(0);
        let create = |path: &Path| {
            fs::create_dir(path)?;
            attempts.set(attempts.get() + 1);
            if attempts.get() == 1 {
                fs::remove_dir(path)?;
            }
            File::open(path)
        };
        let directory = create_locked(parent.path(), Path::new("name"), create).unwrap();
        assert!(directory.path().is_dir());
        assert_eq!(attempts.get(), 2);
    }
}
