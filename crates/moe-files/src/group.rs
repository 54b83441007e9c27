//! Output files of one directory that all appear or none.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use tempfile::TempPath;

use crate::atomic::{Pending, check_path, rename_all};
use crate::check_inputs;
use crate::error::Error;
use crate::temporary::NewDirectories;
use crate::temporary_directory::TemporaryDirectory;

/// Output files of one directory, written into a temporary directory inside it.
///
/// [`AtomicFiles::commit`] renames all of them. If the group is dropped without a commit, the files are removed. Unlike
/// [`AtomicFile`](crate::AtomicFile)s, finished files need no file descriptor, so their number is not limited.
#[derive(Debug)]
pub struct AtomicFiles {
    dir: PathBuf,
    temporary: TemporaryDirectory,
    /// Declared after `temporary`, so that it is dropped later: only empty directories can be removed.
    new: NewDirectories,
    names: Vec<String>,
    /// Existing files that the commit removes.
    removed: Vec<PathBuf>,
    replace: bool,
}

impl AtomicFiles {
    /// Creates `dir`, its missing parents, and the temporary directory in it. `replace` allows the replacement of existing files.
    ///
    /// # Errors
    /// A directory cannot be created; [`inputs`](crate::inputs) protects `dir`.
    pub fn create(dir: &Path, replace: bool) -> Result<Self, Error> {
        crate::inputs::check_output(dir)?;
        let mut new = NewDirectories::default();
        new.create(dir)?;
        let temporary = TemporaryDirectory::create(dir, "files")?;
        Ok(Self {
            dir: dir.to_owned(),
            temporary,
            new,
            names: Vec::new(),
            removed: Vec::new(),
            replace,
        })
    }

    /// Creates the file `name`, which must not contain a directory.
    ///
    /// # Errors
    /// [`Error::IsLink`] if the path is a symbolic link; [`Error::Exists`] if the file exists and may not be replaced; [`Error::Io`] also if this group has a file `name`.
    pub fn file(&mut self, name: &str) -> Result<File, Error> {
        let path = self.dir.join(name);
        if Path::new(name).file_name().is_none_or(|file| file != name) {
            let reason = io::Error::new(io::ErrorKind::InvalidInput, "not a file name");
            return Err(Error::io("create", &path)(reason));
        }
        check_path(&path, self.replace)?;
        let file = File::create_new(self.temporary.path().join(name))
            .map_err(Error::io("create", &path))?;
        self.names.push(name.to_owned());
        Ok(file)
    }

    /// Schedules files of an earlier output that no new file replaces for removal by the commit. Returns their number.
    ///
    /// `is_output` decides for every other file of the directory, by its path. Returns 0 if files may not be replaced. Call
    /// this after the last [`AtomicFiles::file`].
    ///
    /// # Errors
    /// The directory cannot be listed; [`inputs`](crate::inputs) protects a file to remove; errors of `is_output`.
    pub fn remove_others<E: From<Error>>(
        &mut self,
        is_output: impl Fn(&Path) -> Result<bool, E>,
    ) -> Result<usize, E> {
        if !self.replace {
            return Ok(0);
        }
        let new: HashSet<&str> = self.names.iter().map(String::as_str).collect();
        for entry in fs::read_dir(&self.dir).map_err(Error::io("list", &self.dir))? {
            let entry = entry.map_err(Error::io("list", &self.dir))?;
            let is_dir = entry.file_type().is_ok_and(|found| found.is_dir());
            let is_new = entry
                .file_name()
                .to_str()
                .is_some_and(|name| new.contains(name));
            let path = entry.path();
            if !is_dir && !is_new && is_output(&path)? {
                crate::inputs::check_output(&path)?;
                self.removed.push(path);
            }
        }
        Ok(self.removed.len())
    }

    /// Number of files created so far.
    pub fn len(&self) -> usize {
        self.names.len()
    }

    /// Whether no file was created so far.
    pub fn is_empty(&self) -> bool {
        self.names.is_empty()
    }

    /// Renames the files into their directory, and removes the files that [`AtomicFiles::remove_others`] scheduled.
    ///
    /// # Errors
    /// The errors of [`commit_all`](crate::commit_all).
    pub fn commit(mut self) -> Result<(), Error> {
        check_inputs()?;
        let mut files = Vec::with_capacity(self.names.len());
        for name in &self.names {
            let temporary = self.temporary.path().join(name);
            let path = self.dir.join(name);
            let file = Pending {
                replace: self.replace,
                temporary: Some(
                    TempPath::try_from_path(&temporary).map_err(Error::io("write", &path))?,
                ),
                path,
            };
            if file.replaces() {
                File::open(&temporary)
                    .and_then(|file| file.sync_all())
                    .map_err(Error::io("write", &file.path))?;
            }
            files.push(file);
        }
        rename_all(files, &self.removed)?;
        self.new.keep();
        Ok(())
    }
}
