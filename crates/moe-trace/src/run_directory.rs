//! Checks and locks the directory into which a recorder writes a run.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use moe_files::{BACKUP_NAME, NewDirectories, Transaction, check_link, inputs, is_temporary_name};

use crate::error::Error;
use crate::manifest::{self, Manifest};
use crate::phase::Phase;
use crate::rest::REST_FILE;
use crate::run::TRACE_FILE;
use crate::{buffers, graph, hot_cache, map_table, transfers};

/// Files that a run has from its creation on.
const RUN_FILES: [&str; 4] = [
    TRACE_FILE,
    buffers::FILE_NAME,
    map_table::FILE_NAME,
    manifest::FILE_NAME,
];

/// Number of attempts to lock a directory.
const LOCK_ATTEMPTS: usize = 5;
const LOCK_WAIT: Duration = Duration::from_millis(10);

/// A directory for a new run.
pub(crate) struct RunDirectory {
    /// The lock against other recorders, held as long as the file is open.
    pub(crate) lock: Option<File>,
    /// Whether it contains a run, which will be replaced.
    pub(crate) has_run: bool,
}

/// The contents of a directory.
enum Contents {
    /// Nothing, or files of an interrupted creation of a run.
    Empty,
    /// A run.
    Run,
    /// Something else, with the reason why it is not a run.
    Other(&'static str),
}

/// Locks `dir`, which is created if it does not exist. It is empty, or contains a run that may be replaced.
pub(crate) fn take(
    dir: &Path,
    force: bool,
    new: &mut NewDirectories,
) -> Result<RunDirectory, Error> {
    check_place(dir)?;
    new.create(dir)?;
    // If another recorder has the lock, the new directory belongs to it, although it may still be empty.
    let lock = lock(dir).inspect_err(|_| new.keep())?;
    let has_run = has_run(dir, force)?;
    remove_temporary_files(dir)?;
    Ok(RunDirectory { lock, has_run })
}

/// Returns the error that [`take`] would return, without changing anything.
pub(crate) fn check(dir: &Path, force: bool) -> Result<(), Error> {
    check_place(dir)?;
    if dir.is_dir() {
        lock(dir)?;
        has_run(dir, force)?;
    }
    Ok(())
}

fn check_place(dir: &Path) -> Result<(), Error> {
    inputs::check_output(dir)?;
    match dir.symlink_metadata() {
        Ok(_) if !dir.is_dir() => Err(not_replaceable(dir, "it is not a directory")),
        _ => Ok(()),
    }
}

fn not_replaceable(dir: &Path, reason: &'static str) -> Error {
    Error::NotReplaceable {
        path: dir.to_owned(),
        reason,
    }
}

/// Whether a directory contains a run that may be replaced. Other contents, and files that are inputs, are errors.
fn has_run(dir: &Path, force: bool) -> Result<bool, Error> {
    match contents(dir)? {
        Contents::Empty => Ok(false),
        Contents::Run if !force => Err(Error::Exists {
            path: dir.to_owned(),
        }),
        Contents::Run => {
            for file in RUN_FILES {
                check_link(&dir.join(file))?;
            }
            for path in optional_files(dir) {
                inputs::check_output(&path)?;
            }
            Ok(true)
        }
        Contents::Other(reason) => Err(not_replaceable(dir, reason)),
    }
}

/// Determines the contents of a directory that no other recorder is writing.
fn contents(dir: &Path) -> Result<Contents, Error> {
    let entries = fs::read_dir(dir)
        .and_then(|entries| entries.collect::<io::Result<Vec<_>>>())
        .map_err(Error::io("list", dir))?;
    let names: Vec<OsString> = entries.iter().map(fs::DirEntry::file_name).collect();
    let has = |file: &str| names.iter().any(|name| name == file);
    let trace = fs::metadata(dir.join(TRACE_FILE)).ok();
    let has_trace = trace.as_ref().is_some_and(fs::Metadata::is_file);
    if !has(manifest::FILE_NAME) {
        return Ok(if is_unfinished(dir, &names) {
            Contents::Empty
        } else {
            Contents::Other("it has no manifest.json")
        });
    }
    let is_manifest = match Manifest::read(&dir.join(manifest::FILE_NAME)) {
        Err(error @ Error::Io { .. }) => return Err(error),
        read => read.is_ok(),
    };
    Ok(if !is_manifest {
        Contents::Other("its manifest.json is not that of a run")
    } else if !has_trace {
        Contents::Other("it has no trace.bin")
    } else {
        Contents::Run
    })
}

/// Whether a directory without a manifest is empty, or contains only files of an interrupted creation of a run.
///
/// The manifest of a new run is renamed last. Before that, its temporary file exists, and trace and buffers are empty. The
/// map is not empty, so it counts as part of a run only if there is a readable temporary manifest.
fn is_unfinished(dir: &Path, names: &[OsString]) -> bool {
    let manifests = || {
        let names = names.iter();
        names.filter(|name| is_temporary(name, manifest::FILE_NAME))
    };
    let is_own = |name: &OsString| {
        let is_empty = || {
            let found = fs::symlink_metadata(dir.join(name));
            found.is_ok_and(|found| found.is_file() && found.len() == 0)
        };
        let of_run = || manifests().any(|name| Manifest::read(&dir.join(name)).is_ok());
        is_temporary_name(name, Some(BACKUP_NAME))
            || RUN_FILES.iter().any(|file| is_temporary(name, file))
            || RUN_FILES.iter().any(|file| name == file)
                && (is_empty() || name == map_table::FILE_NAME && of_run())
    };
    names.is_empty() || manifests().next().is_some() && names.iter().all(is_own)
}

/// Whether `name` is a temporary name for the incomplete `file` of a run.
fn is_temporary(name: &OsStr, file: &str) -> bool {
    is_temporary_name(name, Some(file)) || numbered_file(name) == Some(file)
}

/// `FILE` of a name `.FILE.PROCESS.tmp`, the temporary names of version 0.1.0.
fn numbered_file(name: &OsStr) -> Option<&str> {
    let stem = name.to_str()?.strip_suffix(".tmp")?;
    let (file, process) = stem.strip_prefix('.')?.rsplit_once('.')?;
    let is_number = !process.is_empty() && process.bytes().all(|byte| byte.is_ascii_digit());
    (is_number && RUN_FILES.contains(&file)).then_some(file)
}

/// Removes temporary files of killed recorders. [`moe_files`] removes its own when it creates the next file.
fn remove_temporary_files(dir: &Path) -> Result<(), Error> {
    for entry in fs::read_dir(dir).map_err(Error::io("list", dir))? {
        let entry = entry.map_err(Error::io("list", dir))?;
        if numbered_file(&entry.file_name()).is_some() {
            remove(&entry.path())?;
        }
    }
    Ok(())
}

/// The optional files of an earlier run.
fn optional_files(dir: &Path) -> Vec<PathBuf> {
    let graphs = dir.join(graph::DIRECTORY);
    let transfers = dir.join(transfers::FILE_NAME);
    let perf = dir.join(hot_cache::PERF_FILE);
    let rest = dir.join(REST_FILE);
    if graphs.is_symlink() {
        // A symlink: files in another directory are not removed.
        return vec![graphs, transfers, perf, rest];
    }
    let [prompt, generate] = Phase::ALL.map(|phase| graph::path(dir, phase));
    vec![prompt, generate, transfers, perf, rest]
}

/// Removes the optional files of an earlier run.
pub(crate) fn remove_optional_files(
    dir: &Path,
    transaction: &mut Transaction,
) -> Result<(), Error> {
    for path in optional_files(dir) {
        transaction.remove(&path)?;
    }
    Ok(())
}

/// Removes a file, if it exists.
fn remove(path: &Path) -> Result<(), Error> {
    match fs::remove_file(path) {
        Err(error)
            if !matches!(
                error.kind(),
                io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
            ) =>
        {
            Err(Error::io("remove", path)(error))
        }
        _ => Ok(()),
    }
}

/// Locks a directory against other recorders until the file is closed.
///
/// `None` if a directory cannot be opened or locked (systems other than Unix, some network file systems). Two recorders are
/// not detected there.
fn lock(dir: &Path) -> Result<Option<File>, Error> {
    let Ok(file) = File::open(dir) else {
        return Ok(None);
    };
    for _ in 0..LOCK_ATTEMPTS {
        match file.try_lock() {
            Ok(()) => return Ok(Some(file)),
            // A reader may hold the lock briefly, see `check::unfinished_state`.
            Err(TryLockError::WouldBlock) => std::thread::sleep(LOCK_WAIT),
            Err(TryLockError::Error(_)) => return Ok(None),
        }
    }
    Err(Error::InUse {
        path: dir.to_owned(),
    })
}
