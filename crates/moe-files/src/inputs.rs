//! The inputs of this process. No output may replace them.
//!
//! A program registers its inputs with [`protect`] and [`protect_directory`] before it writes. On Unix, files are compared
//! by device and inode, so that hard links and symbolic links are recognized; on other systems, by resolved path.

use std::collections::{HashMap, HashSet, VecDeque};
use std::fs::{self, Metadata};
use std::path::{Path, PathBuf};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use crate::error::Error;
use crate::parent_of;

/// Maximum depth at which files of an input directory are registered. The files of a dataset are `TABLE/run=ID/FILE`.
const MAX_DEPTH: usize = 3;

#[derive(Debug, Default)]
struct Inputs {
    files: HashMap<Identity, PathBuf>,
    /// Directories without new files: the resolved path, and the path as registered.
    closed: Vec<(PathBuf, PathBuf)>,
}

static INPUTS: LazyLock<Mutex<Inputs>> = LazyLock::new(Mutex::default);

fn inputs() -> MutexGuard<'static, Inputs> {
    INPUTS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Identifies a file: equal for all paths to the same file.
#[derive(Debug, PartialEq, Eq, Hash)]
struct Identity(#[cfg(unix)] (u64, u64), #[cfg(not(unix))] PathBuf);

impl Identity {
    #[cfg(unix)]
    fn of(_: &Path, found: &Metadata) -> Option<Self> {
        use std::os::unix::fs::MetadataExt;
        Some(Self((found.dev(), found.ino())))
    }

    #[cfg(not(unix))]
    fn of(path: &Path, _: &Metadata) -> Option<Self> {
        path.canonicalize().ok().map(Self)
    }
}

/// Protects a file, or the files that a directory contains now. A path that does not exist is ignored.
pub fn protect(path: &Path) {
    protect_files(&mut inputs(), path);
}

/// Protects the files of a directory, and rejects new files inside it.
pub fn protect_directory(path: &Path) {
    let mut inputs = inputs();
    protect_files(&mut inputs, path);
    if let Ok(resolved) = path.canonicalize() {
        inputs.closed.push((resolved, path.to_owned()));
    }
}

fn protect_files(inputs: &mut Inputs, path: &Path) {
    // Breadth-first: a directory that is reachable by several paths is listed once, at its smallest depth. Links are followed.
    let mut seen = HashSet::new();
    let mut waiting = VecDeque::from([(path.to_owned(), MAX_DEPTH)]);
    while let Some((path, depth)) = waiting.pop_front() {
        let Ok(found) = fs::metadata(&path) else {
            continue;
        };
        let Some(identity) = Identity::of(&path, &found) else {
            continue;
        };
        if found.is_file() {
            inputs.files.insert(identity, path);
        } else if found.is_dir() && depth > 0 && seen.insert(identity) {
            // A directory that cannot be listed is ignored: this process cannot read its files either.
            let entries = fs::read_dir(&path).into_iter().flatten().flatten();
            waiting.extend(entries.map(|entry| (entry.path(), depth - 1)));
        }
    }
}

/// Rejects an output file or directory `path` that would replace an input or be inside a protected directory.
///
/// # Errors
/// [`Error::IsInput`], [`Error::InsideInput`].
pub fn check_output(path: &Path) -> Result<(), Error> {
    let inputs = inputs();
    if let Ok(found) = fs::metadata(path)
        && Identity::of(path, &found).is_some_and(|identity| inputs.files.contains_key(&identity))
    {
        return Err(Error::IsInput {
            path: path.to_owned(),
        });
    }
    let output = resolved(path);
    match inputs
        .closed
        .iter()
        .find(|(closed, _)| output.starts_with(closed))
    {
        Some((closed, _)) if output == *closed => Err(Error::IsInput {
            path: path.to_owned(),
        }),
        Some((_, directory)) => Err(Error::InsideInput {
            path: path.to_owned(),
            directory: directory.clone(),
        }),
        None => Ok(()),
    }
}

/// Returns the absolute path without symbolic links. Components that do not exist are kept as they are.
///
/// Two outputs with equal resolved paths are the same file.
pub fn resolved(path: &Path) -> PathBuf {
    if let Ok(resolved) = path.canonicalize() {
        return resolved;
    }
    match path.file_name() {
        Some(name) => {
            let parent = parent_of(path);
            if parent == path {
                return path.to_owned();
            }
            resolved(parent).join(name)
        }
        None => std::path::absolute(path).unwrap_or_else(|_| path.to_owned()),
    }
}
