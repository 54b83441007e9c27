//! Locks on directories while a group of outputs is renamed into them.

use std::collections::BTreeSet;
use std::fs::{File, TryLockError};
use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

use crate::{inputs, parent_of};

/// Time between two attempts, and their maximum number. Renames take less than a second; a recorder keeps the lock of its run
/// directory longer.
const WAIT: Duration = Duration::from_millis(10);
const MAX_ATTEMPTS: usize = 500;

/// Locks the directories of `paths` until the files are closed, so that two processes do not mix their groups of outputs.
///
/// A directory that cannot be opened or locked is omitted, also if another process keeps its lock. Always call this before
/// locking the registry.
pub(crate) fn lock_directories<'p>(paths: impl Iterator<Item = &'p Path>) -> Vec<File> {
    // All processes lock directories in the same order.
    let dirs: BTreeSet<_> = paths
        .map(|path| inputs::resolved(parent_of(path)))
        .collect();
    dirs.iter().filter_map(|dir| lock(dir)).collect()
}

fn lock(dir: &Path) -> Option<File> {
    let file = File::open(dir).ok()?;
    for _ in 0..MAX_ATTEMPTS {
        match file.try_lock() {
            Ok(()) => return Some(file),
            Err(TryLockError::WouldBlock) => sleep(WAIT),
            Err(TryLockError::Error(_)) => return None,
        }
    }
    None
}
