//! What a process that is ended by a signal has to remove: its temporary files, and directories
//! that it made for them.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use crate::error::Error;

/// Temporary files and new directories of this process.
#[derive(Debug, Default)]
pub(crate) struct Registry {
    pub(crate) files: HashSet<PathBuf>,
    /// Directories of temporary files, removed with their contents.
    pub(crate) trees: HashSet<PathBuf>,
    /// Directories made for outputs, parents first; removed where they are empty.
    directories: Vec<PathBuf>,
}

static REGISTRY: LazyLock<Mutex<Registry>> = LazyLock::new(Mutex::default);

/// The registry. Hold it while a temporary file is created or renamed, so that no signal comes in between.
pub(crate) fn registry() -> MutexGuard<'static, Registry> {
    REGISTRY.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Registry {
    /// Removes everything; failures are ignored, since the process ends.
    pub(crate) fn remove_all(&mut self) {
        for file in self.files.drain() {
            let _ = fs::remove_file(file);
        }
        for tree in self.trees.drain() {
            let _ = fs::remove_dir_all(tree);
        }
        for directory in self.directories.drain(..).rev() {
            let _ = fs::remove_dir(directory);
        }
    }
}

/// Directories that were made for outputs. Dropped before [`NewDirectories::keep`], it removes those that are empty.
#[derive(Debug, Default)]
pub struct NewDirectories {
    /// Parents first.
    made: Vec<PathBuf>,
}

impl NewDirectories {
    /// Makes `dir` and its missing parents.
    ///
    /// # Errors
    /// A directory cannot be made.
    pub fn create(&mut self, dir: &Path) -> Result<(), Error> {
        let mut registry = registry();
        let missing = dir
            .ancestors()
            .take_while(|dir| !dir.as_os_str().is_empty() && dir.symlink_metadata().is_err());
        let missing: Vec<PathBuf> = missing.map(Path::to_owned).collect();
        for dir in missing.iter().rev() {
            match fs::create_dir(dir) {
                Ok(()) => {
                    registry.directories.push(dir.clone());
                    self.made.push(dir.clone());
                }
                // Another process made it meanwhile: it is not ours to remove.
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(Error::io("create", dir)(error)),
            }
        }
        Ok(())
    }

    /// Keeps the directories.
    pub fn keep(&mut self) {
        let mut registry = registry();
        registry.directories.retain(|dir| !self.made.contains(dir));
        self.made.clear();
    }
}

impl Drop for NewDirectories {
    fn drop(&mut self) {
        for dir in self.made.iter().rev() {
            // Fails where the directory is not empty.
            let _ = fs::remove_dir(dir);
        }
        self.keep();
    }
}
