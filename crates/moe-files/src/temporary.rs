//! Temporary files and directories of this process, which are removed when a signal ends it.

use std::collections::HashSet;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use crate::error::Error;
use crate::parent_of;
use crate::stale::temporary_names;

/// The temporary files and new directories of this process.
#[derive(Debug, Default)]
pub(crate) struct Registry {
    pub(crate) files: HashSet<PathBuf>,
    /// Temporary directories, removed with their contents.
    pub(crate) trees: HashSet<PathBuf>,
    /// Directories created for outputs, parents first. They are removed if they are empty.
    directories: Vec<PathBuf>,
}

static REGISTRY: LazyLock<Mutex<Registry>> = LazyLock::new(Mutex::default);

/// Locks the registry. Hold the lock while a temporary file is created or renamed: the signal thread needs it to remove files.
pub(crate) fn registry() -> MutexGuard<'static, Registry> {
    REGISTRY.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Registry {
    /// Removes all files and directories. Errors are ignored, because the process ends.
    pub(crate) fn remove_all(&mut self) {
        for file in self.files.drain() {
            let _ = fs::remove_file(file);
        }
        for tree in self.trees.drain() {
            remove_tree(&tree);
        }
        for directory in self.directories.drain(..).rev() {
            let _ = fs::remove_dir(directory);
        }
    }
}

/// Removes a directory with its contents, in which other threads may still create files.
///
/// The directory is renamed first: under the old path, no thread can create a file after that.
fn remove_tree(tree: &Path) {
    let renamed = temporary_names(Path::new("removed"), |builder| {
        builder.make_in(parent_of(tree), |path| fs::rename(tree, path))
    });
    // A `TempPath` removes files only.
    let renamed = renamed
        .ok()
        .and_then(|file| file.into_temp_path().keep().ok());
    let _ = fs::remove_dir_all(renamed.as_deref().unwrap_or(tree));
}

/// Directories that were created for outputs. Dropping the value without [`NewDirectories::keep`] removes the empty ones.
#[derive(Debug, Default)]
pub struct NewDirectories {
    /// Parents first.
    created: Vec<PathBuf>,
}

impl NewDirectories {
    /// Creates `dir` and its missing parents.
    ///
    /// # Errors
    /// A directory cannot be created.
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
                    self.created.push(dir.clone());
                }
                // Another process created it meanwhile, so it must not be removed here.
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                Err(error) => return Err(Error::io("create", dir)(error)),
            }
        }
        Ok(())
    }

    /// Keeps the directories.
    pub fn keep(&mut self) {
        let mut registry = registry();
        registry
            .directories
            .retain(|dir| !self.created.contains(dir));
        self.created.clear();
    }
}

impl Drop for NewDirectories {
    fn drop(&mut self) {
        for dir in self.created.iter().rev() {
            // Fails if the directory is not empty.
            let _ = fs::remove_dir(dir);
        }
        self.keep();
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;

    use super::*;

    #[test]
    fn removes_a_directory_in_which_another_thread_creates_files() {
        let parent = tempfile::tempdir().unwrap();
        let tree = parent.path().join("tree");
        fs::create_dir(&tree).unwrap();
        let is_stopped = AtomicBool::new(false);
        let removed = thread::scope(|scope| {
            scope.spawn(|| {
                for n in 0_u64.. {
                    let is_created = File::create(tree.join(n.to_string())).is_ok();
                    if !is_created || is_stopped.load(Ordering::Relaxed) {
                        break;
                    }
                }
            });
            while !tree.join("0").exists() {
                thread::yield_now();
            }
            let mut registry = Registry::default();
            registry.trees.insert(tree.clone());
            registry.remove_all();
            is_stopped.store(true, Ordering::Relaxed);
            !tree.exists()
        });
        assert!(removed);
        assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 0);
    }
}
