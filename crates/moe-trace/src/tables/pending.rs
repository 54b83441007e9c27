//! Tables that are complete and not yet in their places.

use std::path::PathBuf;

use moe_files::{AtomicFile, NewDirectories, commit_and_remove};

use crate::error::Error;

/// Complete files under temporary names; [`PendingTables::commit`] puts all of them in their places. Dropped before, they are
/// removed.
#[derive(Debug, Default)]
pub struct PendingTables {
    files: Vec<AtomicFile>,
    /// Dropped after the files in them.
    directories: Vec<NewDirectories>,
    /// Files of an earlier output, which the commit removes.
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

    /// Adds a file, such as the map of the model.
    pub fn push(&mut self, file: AtomicFile) {
        self.files.push(file);
    }

    /// Lets the commit also remove a file of an earlier output.
    pub fn remove(&mut self, path: PathBuf) {
        self.removed.push(path);
    }

    /// Puts the files in their places, and removes those of an earlier output.
    ///
    /// # Errors
    /// As [`commit_and_remove`].
    pub fn commit(mut self) -> Result<(), Error> {
        commit_and_remove(std::mem::take(&mut self.files), &self.removed)?;
        self.directories.iter_mut().for_each(NewDirectories::keep);
        Ok(())
    }
}
