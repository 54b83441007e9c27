//! Inputs of this process, which none of its outputs may replace.
//!
//! A program names its inputs with [`protect`] and [`protect_directory`] before it writes. Files are compared by device
//! and inode, so that hard links and symbolic links are recognized; on systems without these, by their resolved paths.

use std::collections::{HashMap, HashSet, VecDeque};
use std::fs::{self, Metadata};
use std::path::{Path, PathBuf};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use crate::error::Error;
use crate::parent_of;

/// Levels of directories in which files of an input directory are found: a dataset has `TABLE/run=ID/FILE`.
const MAX_DEPTH: usize = 3;

#[derive(Debug, Default)]
struct Inputs {
    files: HashMap<Identity, PathBuf>,
    /// Resolved paths in which nothing is written, each with the path that the user gave.
    closed: Vec<(PathBuf, PathBuf)>,
}

static INPUTS: LazyLock<Mutex<Inputs>> = LazyLock::new(Mutex::default);

fn inputs() -> MutexGuard<'static, Inputs> {
    INPUTS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What is the same for two paths to one file.
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

/// Protects a file, or the files that a directory has now. A path that does not exist is ignored.
pub fn protect(path: &Path) {
    protect_files(&mut inputs(), path);
}

/// Protects a directory: its files, and against new files inside it.
pub fn protect_directory(path: &Path) {
    let mut inputs = inputs();
    protect_files(&mut inputs, path);
    if let Ok(resolved) = path.canonicalize() {
        inputs.closed.push((resolved, path.to_owned()));
    }
}

fn protect_files(inputs: &mut Inputs, path: &Path) {
    // Links are followed, each directory is listed once, and a directory near the root before one that is deeper.
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
            // A directory that cannot be listed has no files that this process reads.
            let entries = fs::read_dir(&path).into_iter().flatten().flatten();
            waiting.extend(entries.map(|entry| (entry.path(), depth - 1)));
        }
    }
}

/// Refuses to write the file or directory `path` where that would replace an input or add to a protected directory.
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
    let place = resolved(path);
    match inputs
        .closed
        .iter()
        .find(|(closed, _)| place.starts_with(closed))
    {
        Some((closed, _)) if place == *closed => Err(Error::IsInput {
            path: path.to_owned(),
        }),
        Some((_, directory)) => Err(Error::InsideInput {
            path: path.to_owned(),
            directory: directory.clone(),
        }),
        None => Ok(()),
    }
}

/// The path without links, as far as it exists: two outputs with one resolved path are one file.
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
