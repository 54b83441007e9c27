//! Renames and removals of which all happen, or none.

use std::collections::BTreeSet;
use std::fs;
#[cfg(unix)]
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use tempfile::TempPath;

use crate::atomic::{AtomicFile, Pending, temporary_names};
use crate::error::Error;
use crate::parent_of;
use crate::temporary::{Registry, registry};

/// Renames and removals that are undone unless [`Transaction::finish`] succeeds.
///
/// What is replaced or removed keeps a second, temporary name until then. On a file system without hard links a file
/// that was replaced cannot be restored. A process that is killed undoes nothing.
#[derive(Debug, Default)]
pub struct Transaction {
    changes: Vec<Change>,
    /// Directories in which a file was replaced or removed since the last sync.
    unsynced: BTreeSet<PathBuf>,
}

#[derive(Debug)]
struct Change {
    path: PathBuf,
    old: Old,
}

/// What was at a path.
#[derive(Debug)]
enum Old {
    Nothing,
    /// The file, under a temporary name.
    Kept(TempPath),
    /// A file that could not be kept.
    Lost,
}

impl Transaction {
    /// Renames a file to its path. A file that is replaced stays until the new contents are on the disk.
    ///
    /// # Errors
    /// As [`AtomicFile::commit`].
    pub fn rename(&mut self, mut file: AtomicFile) -> Result<(), Error> {
        file.sync_if_it_replaces()?;
        // Open, so that the temporary file stays locked until it is renamed.
        let (_open, mut pending) = file.into_parts();
        self.rename_pending(&mut pending, &mut registry())
    }

    /// Removes a file, if it exists.
    ///
    /// # Errors
    /// It cannot be removed, or [`inputs`](crate::inputs) protects it.
    pub fn remove(&mut self, path: &Path) -> Result<(), Error> {
        self.remove_locked(path, &mut registry())
    }

    /// Brings the changes so far to the disk.
    ///
    /// # Errors
    /// A directory cannot be synced.
    pub fn sync(&mut self) -> Result<(), Error> {
        self.unsynced
            .iter()
            .try_for_each(|dir| sync_directory(dir))?;
        self.unsynced.clear();
        Ok(())
    }

    /// Keeps the changes.
    ///
    /// # Errors
    /// As [`Transaction::sync`]; then the changes are undone.
    pub fn finish(mut self) -> Result<(), Error> {
        self.sync()?;
        let mut registry = registry();
        for change in self.changes.drain(..) {
            if let Old::Kept(old) = change.old {
                registry.files.remove(&*old);
            }
        }
        Ok(())
    }

    pub(crate) fn rename_pending(
        &mut self,
        file: &mut Pending,
        registry: &mut Registry,
    ) -> Result<(), Error> {
        let old = match file.replaces() {
            true => link(&file.path, registry),
            false => Old::Nothing,
        };
        let replaces = !matches!(old, Old::Nothing);
        if let Err(error) = file.rename(registry) {
            forget(&old, registry);
            return Err(error);
        }
        if replaces {
            self.unsynced.insert(parent_of(&file.path).to_owned());
        }
        let path = file.path.clone();
        self.changes.push(Change { path, old });
        Ok(())
    }

    pub(crate) fn remove_locked(
        &mut self,
        path: &Path,
        registry: &mut Registry,
    ) -> Result<(), Error> {
        crate::inputs::check_output(path)?;
        let old = link(path, registry);
        match fs::remove_file(path) {
            Ok(()) => {
                self.unsynced.insert(parent_of(path).to_owned());
                let path = path.to_owned();
                self.changes.push(Change { path, old });
                Ok(())
            }
            Err(error) => {
                forget(&old, registry);
                match error.kind() {
                    io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => Ok(()),
                    _ => Err(Error::io("remove", path)(error)),
                }
            }
        }
    }

    /// Undoes all changes, the last one first, as far as the system lets it.
    pub(crate) fn undo(&mut self, registry: &mut Registry) {
        for Change { path, old } in self.changes.drain(..).rev() {
            forget(&old, registry);
            match old {
                Old::Nothing => {
                    let _ = fs::remove_file(&path);
                }
                Old::Kept(old) => {
                    let _ = old.persist(&path);
                }
                Old::Lost => {}
            }
        }
    }
}

impl Drop for Transaction {
    fn drop(&mut self) {
        // `finish` and `undo` leave nothing; the caller of `undo` may hold the registry.
        if !self.changes.is_empty() {
            self.undo(&mut registry());
        }
    }
}

/// Gives a file a second, temporary name.
fn link(path: &Path, registry: &mut Registry) -> Old {
    let linked = temporary_names(path, |builder| {
        builder.make_in(parent_of(path), |name| fs::hard_link(path, name))
    });
    match linked {
        Ok(linked) => {
            let old = linked.into_temp_path();
            registry.files.insert(old.to_path_buf());
            Old::Kept(old)
        }
        Err(_) => Old::Lost,
    }
}

/// A signal need not remove the second name any more.
fn forget(old: &Old, registry: &mut Registry) {
    if let Old::Kept(old) = old {
        registry.files.remove(&**old);
    }
}

/// Brings the renames in a directory to the disk.
#[cfg(unix)]
fn sync_directory(dir: &Path) -> Result<(), Error> {
    match File::open(dir).and_then(|dir| dir.sync_all()) {
        // Some file systems cannot sync a directory, and some directories cannot be read.
        Err(error)
            if !matches!(
                error.kind(),
                io::ErrorKind::InvalidInput
                    | io::ErrorKind::Unsupported
                    | io::ErrorKind::PermissionDenied
            ) =>
        {
            Err(Error::io("sync the directory", dir)(error))
        }
        _ => Ok(()),
    }
}

#[cfg(not(unix))]
fn sync_directory(_: &Path) -> Result<(), Error> {
    Ok(())
}
