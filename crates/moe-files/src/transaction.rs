//! Renames and removals that are undone together on an error.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use crate::atomic::{AtomicFile, Pending, create_directory};
use crate::error::Error;
use crate::parent_of;
use crate::temporary::{Registry, registry};

/// Output name in the temporary name of the directory in which a [`Transaction`] keeps replaced and removed files.
pub const BACKUP_NAME: &str = "old";

/// Renames and removals that are undone unless [`Transaction::finish`] succeeds.
///
/// Until then, replaced and removed files have a second, temporary name: a hard link. On a file system without hard links
/// they cannot be restored. A process that is killed undoes nothing.
#[derive(Debug, Default)]
pub struct Transaction {
    changes: Vec<Change>,
    /// Second names of files, by the directory of the files.
    kept: BTreeMap<PathBuf, KeptFiles>,
    /// Directories in which a file was replaced or removed since the last sync.
    unsynced: BTreeSet<PathBuf>,
}

#[derive(Debug)]
struct Change {
    path: PathBuf,
    old: Old,
    /// The file at the path after the change; `None` if it was removed.
    new: Option<Identity>,
}

/// Identifies a file: equal for all names of the same file.
#[cfg(unix)]
type Identity = (u64, u64);

/// Identifies a file by its size, and the times of its creation and last change.
#[cfg(not(unix))]
type Identity = (
    u64,
    Option<std::time::SystemTime>,
    Option<std::time::SystemTime>,
);

/// Returns the identity of the file at a path, if it exists. Symbolic links are not followed.
#[cfg(unix)]
fn identity(path: &Path) -> Option<Identity> {
    use std::os::unix::fs::MetadataExt;
    let found = path.symlink_metadata().ok()?;
    Some((found.dev(), found.ino()))
}

#[cfg(not(unix))]
fn identity(path: &Path) -> Option<Identity> {
    let found = path.symlink_metadata().ok()?;
    Some((found.len(), found.created().ok(), found.modified().ok()))
}

/// What existed at a path before a change.
#[derive(Debug)]
enum Old {
    Nothing,
    /// The file, under a temporary name.
    Kept(PathBuf),
    /// A file that could not be linked and cannot be restored.
    Lost,
}

/// A temporary directory of second names. It is locked, so that other processes do not remove it as stale. One lock for the
/// directory needs one file descriptor for any number of files.
#[derive(Debug)]
struct KeptFiles {
    dir: PathBuf,
    n_files: usize,
    _lock: File,
}

impl KeptFiles {
    fn create(parent: &Path, registry: &mut Registry) -> io::Result<Self> {
        let (lock, dir) = create_directory(parent, BACKUP_NAME, registry)?;
        Ok(Self {
            dir,
            n_files: 0,
            _lock: lock,
        })
    }

    fn link(&mut self, path: &Path) -> io::Result<PathBuf> {
        let name = self.dir.join(self.n_files.to_string());
        fs::hard_link(path, &name)?;
        self.n_files += 1;
        Ok(name)
    }
}

impl Transaction {
    /// Renames a file to its path. An existing file is replaced only after the new contents are on the disk.
    ///
    /// # Errors
    /// The errors of [`AtomicFile::commit`], except [`Error::Truncated`].
    pub fn rename(&mut self, mut file: AtomicFile) -> Result<(), Error> {
        file.sync_if_it_replaces()?;
        // An open file keeps its lock until it is renamed.
        let (_open, mut pending) = file.into_parts();
        self.rename_pending(&mut pending, &mut registry())
    }

    /// Removes a file if it exists.
    ///
    /// # Errors
    /// The file cannot be removed; [`inputs`](crate::inputs) protects it.
    pub fn remove(&mut self, path: &Path) -> Result<(), Error> {
        self.remove_locked(path, &mut registry())
    }

    /// Syncs the changes so far to the disk.
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

    /// Syncs the changes and makes them permanent.
    ///
    /// # Errors
    /// The errors of [`Transaction::sync`]. After an error the changes are undone.
    pub fn finish(mut self) -> Result<(), Error> {
        self.sync()?;
        self.changes.clear();
        self.remove_kept(&mut registry());
        Ok(())
    }

    pub(crate) fn rename_pending(
        &mut self,
        file: &mut Pending,
        registry: &mut Registry,
    ) -> Result<(), Error> {
        let old = if file.replaces() {
            self.keep(&file.path, registry)
        } else {
            Old::Nothing
        };
        let new = file.temporary.as_deref().and_then(identity);
        file.rename(registry)?;
        if !matches!(old, Old::Nothing) {
            self.unsynced.insert(parent_of(&file.path).to_owned());
        }
        let path = file.path.clone();
        self.changes.push(Change { path, old, new });
        Ok(())
    }

    pub(crate) fn remove_locked(
        &mut self,
        path: &Path,
        registry: &mut Registry,
    ) -> Result<(), Error> {
        crate::inputs::check_output(path)?;
        let old = self.keep(path, registry);
        match fs::remove_file(path) {
            Ok(()) => {
                self.unsynced.insert(parent_of(path).to_owned());
                let path = path.to_owned();
                let new = None;
                self.changes.push(Change { path, old, new });
                Ok(())
            }
            Err(error) => match error.kind() {
                io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => Ok(()),
                _ => Err(Error::io("remove", path)(error)),
            },
        }
    }

    /// Links a file to a second, temporary name.
    fn keep(&mut self, path: &Path, registry: &mut Registry) -> Old {
        self.link(path, registry).map_or(Old::Lost, Old::Kept)
    }

    fn link(&mut self, path: &Path, registry: &mut Registry) -> io::Result<PathBuf> {
        path.symlink_metadata()?;
        let parent = parent_of(path);
        if let Some(kept) = self.kept.get_mut(parent) {
            return kept.link(path);
        }
        let kept = KeptFiles::create(parent, registry)?;
        self.kept
            .entry(parent.to_owned())
            .or_insert(kept)
            .link(path)
    }

    fn remove_kept(&mut self, registry: &mut Registry) {
        for kept in std::mem::take(&mut self.kept).into_values() {
            let _ = fs::remove_dir_all(&kept.dir);
            registry.trees.remove(&kept.dir);
        }
    }

    /// Undoes all changes in reverse order, except at paths that another process has changed since. Errors are ignored.
    pub(crate) fn undo(&mut self, registry: &mut Registry) {
        for Change { path, old, new } in self.changes.drain(..).rev() {
            if identity(&path) != new {
                continue;
            }
            match old {
                Old::Nothing => {
                    let _ = fs::remove_file(&path);
                }
                Old::Kept(old) => {
                    let _ = fs::rename(old, &path);
                }
                Old::Lost => {}
            }
        }
        self.remove_kept(registry);
    }
}

impl Drop for Transaction {
    fn drop(&mut self) {
        // Nothing is left after `finish` and `undo`. Locking the registry then could deadlock: the caller of `undo` holds it.
        if !self.changes.is_empty() || !self.kept.is_empty() {
            self.undo(&mut registry());
        }
    }
}

/// Syncs the renames and removals in a directory to the disk.
#[cfg(unix)]
fn sync_directory(dir: &Path) -> Result<(), Error> {
    match File::open(dir).and_then(|dir| dir.sync_all()) {
        // Some file systems cannot sync directories, and directories without read permission cannot be opened.
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
