//! A temporary directory.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use crate::atomic::{create_directory, remove_stale_once};
use crate::error::Error;
use crate::temporary::registry;

/// A directory that is removed with its contents when the value is dropped or a signal ends the process.
#[derive(Debug)]
pub struct TemporaryDirectory {
    path: PathBuf,
    /// Keeps the directory locked, so that no other process removes it as stale.
    _lock: File,
}

impl TemporaryDirectory {
    /// Creates a directory `.NAME.RANDOM.moe-tmp` in `parent`, which must exist.
    ///
    /// Removes temporary files and directories that killed processes left in `parent`.
    ///
    /// # Errors
    /// The directory cannot be created.
    pub fn create(parent: &Path, name: &str) -> Result<Self, Error> {
        remove_stale_once(parent);
        let mut registry = registry();
        let (lock, path) = create_directory(parent, name, &mut registry)
            .map_err(Error::io("create a file in", parent))?;
        Ok(Self { path, _lock: lock })
    }

    /// The path of the directory.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for TemporaryDirectory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.path);
        registry().trees.remove(&self.path);
    }
}
