//! Tables that are complete and not yet in their places.

use moe_files::{AtomicFile, NewDirectories, commit_all};

use crate::error::Error;

/// Complete files under temporary names; [`PendingTables::commit`] puts all of them in their places. Dropped before, they are
/// removed.
#[derive(Debug, Default)]
pub struct PendingTables {
    files: Vec<AtomicFile>,
    /// Dropped after the files in them.
    directories: Vec<NewDirectories>,
}

impl PendingTables {
    pub(crate) fn new(files: Vec<AtomicFile>, directories: NewDirectories) -> Self {
        Self {
            files,
            directories: vec![directories],
        }
    }

    /// Adds other tables.
    pub fn append(&mut self, mut other: PendingTables) {
        self.files.append(&mut other.files);
        self.directories.append(&mut other.directories);
    }

    /// Adds a file, such as the map of the model.
    pub fn push(&mut self, file: AtomicFile) {
        self.files.push(file);
    }

    /// Puts the files in their places.
    ///
    /// # Errors
    /// As [`commit_all`].
    pub fn commit(mut self) -> Result<(), Error> {
        commit_all(std::mem::take(&mut self.files))?;
        self.directories.iter_mut().for_each(NewDirectories::keep);
        Ok(())
    }
}
