//! Complete tables under temporary names.

use std::path::PathBuf;

use moe_files::{AtomicFile, NewDirectories, commit_and_remove};

use crate::error::Error;

/// Complete files under temporary names. [`PendingTables::commit`] renames all of them; dropping removes them.
#[derive(Debug, Default)]
pub struct PendingTables {
    files: Vec<AtomicFile>,
    /// Dropped after the files, which are inside.
    directories: Vec<NewDirectories>,
    /// Files of an earlier output that `commit` removes.
    removed: Vec<PathBuf>,
}

impl PendingTables {
    pub(crate) fn new(files: Vec<AtomicFile>, directories: NewDirectories) -> Self {
        Self {
            files,
            directories: vec![directories],
            removed: Vec::new(),
        }
    }

    /// Adds other tables.
    pub fn append(&mut self, mut other: PendingTables) {
        self.files.append(&mut other.files);
        self.directories.append(&mut other.directories);
        self.removed.append(&mut other.removed);
    }

    /// Adds a file, for example the offset map.
    pub fn push(&mut self, file: AtomicFile) {
        self.files.push(file);
    }

    /// Adds a file of an earlier output that `commit` removes.
    pub fn remove(&mut self, path: PathBuf) {
        self.removed.push(path);
    }

    /// Renames the files to their final names, and removes those of an earlier output.
    ///
    /// # Errors
    /// Those of [`commit_and_remove`].
    pub fn commit(mut self) -> Result<(), Error> {
        commit_and_remove(std::mem::take(&mut self.files), &self.removed)?;
        self.directories.iter_mut().for_each(NewDirectories::keep);
        Ok(())
    }
}
