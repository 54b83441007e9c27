//! Which directories a recorder may write a run into.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::Path;
use std::time::Duration;

use moe_files::{NewDirectories, inputs, is_temporary_name};

use crate::error::Error;
use crate::manifest::{self, Manifest};
use crate::record::{PHASE_GENERATE, PHASE_PROMPT};
use crate::run::TRACE_FILE;
use crate::{buffers, graph, map_table, transfers};

/// Files that every run has from its creation on.
const RUN_FILES: [&str; 4] = [
    TRACE_FILE,
    buffers::FILE_NAME,
    map_table::FILE_NAME,
    manifest::FILE_NAME,
];

/// How often the lock of a directory is tried, and the time between.
const LOCK_ATTEMPTS: usize = 5;
const LOCK_WAIT: Duration = Duration::from_millis(10);

/// A directory for a new run.
pub(crate) struct RunDirectory {
    /// Keeps other recorders out as long as it is open.
    pub(crate) lock: Option<File>,
    /// Whether it has a run, to be replaced.
    pub(crate) has_run: bool,
}

/// What a directory holds.
enum Contents {
    /// Nothing, or what an interrupted creation of a run left.
    Empty,
    /// A run.
    Run,
    /// Something else, with the reason why it is not a run.
    Other(&'static str),
}

/// Makes `dir` where it does not exist and locks it. It is empty, or has a run and may be replaced.
pub(crate) fn take(
    dir: &Path,
    force: bool,
    new: &mut NewDirectories,
) -> Result<RunDirectory, Error> {
    inputs::check_output(dir)?;
    let not_replaceable = |reason| Error::NotReplaceable {
        path: dir.to_owned(),
        reason,
    };
    if dir.symlink_metadata().is_ok() && !dir.is_dir() {
        return Err(not_replaceable("it is not a directory"));
    }
    new.create(dir)?;
    // Another recorder that has the lock may not have written yet: the directory is its own now.
    let lock = lock(dir).inspect_err(|_| new.keep())?;
    let has_run = match contents(dir)? {
        Contents::Empty => false,
        _ if !force => {
            return Err(Error::Exists {
                path: dir.to_owned(),
            });
        }
        Contents::Run => true,
        Contents::Other(reason) => return Err(not_replaceable(reason)),
    };
    remove_temporary_files(dir)?;
    Ok(RunDirectory { lock, has_run })
}

/// Looks at the files of a directory, which no other recorder is writing.
fn contents(dir: &Path) -> Result<Contents, Error> {
    let entries = fs::read_dir(dir)
        .and_then(|entries| entries.collect::<io::Result<Vec<_>>>())
        .map_err(Error::io("list", dir))?;
    let names: Vec<OsString> = entries.iter().map(fs::DirEntry::file_name).collect();
    let has = |file: &str| names.iter().any(|name| name == file);
    let trace = fs::metadata(dir.join(TRACE_FILE)).ok();
    let has_trace = trace.as_ref().is_some_and(fs::Metadata::is_file);
    if !has(manifest::FILE_NAME) {
        // A new run gets its manifest last; before that its temporary file is there and the trace is empty.
        let is_started = names.iter().any(|name| is_temporary(name));
        let is_own =
            |name: &OsString| is_temporary(name) || RUN_FILES.iter().any(|file| name == file);
        let is_unfinished = is_started
            && names.iter().all(is_own)
            && trace.is_none_or(|trace| has_trace && trace.len() == 0);
        return Ok(if names.is_empty() || is_unfinished {
            Contents::Empty
        } else {
            Contents::Other("it has no manifest.json")
        });
    }
    Ok(if Manifest::read(&dir.join(manifest::FILE_NAME)).is_err() {
        Contents::Other("its manifest.json is not that of a run")
    } else if !has_trace {
        Contents::Other("it has no trace.bin")
    } else {
        Contents::Run
    })
}

/// Whether a recorder wrote the file under a temporary name.
fn is_temporary(name: &OsStr) -> bool {
    is_temporary_name(name, None) || is_numbered_name(name)
}

/// Whether a name is `.RUN FILE.PROCESS.tmp`, the temporary names of version 0.1.0.
fn is_numbered_name(name: &OsStr) -> bool {
    let stem = name.to_str().and_then(|name| name.strip_suffix(".tmp"));
    let parts = stem.and_then(|stem| stem.strip_prefix('.')?.rsplit_once('.'));
    parts.is_some_and(|(file, process)| {
        RUN_FILES.contains(&file)
            && !process.is_empty()
            && process.bytes().all(|byte| byte.is_ascii_digit())
    })
}

/// Removes temporary files of recorders that were killed; those of [`moe_files`] go when the next file is created.
fn remove_temporary_files(dir: &Path) -> Result<(), Error> {
    for entry in fs::read_dir(dir).map_err(Error::io("list", dir))? {
        let entry = entry.map_err(Error::io("list", dir))?;
        if is_numbered_name(&entry.file_name()) {
            remove(&entry.path())?;
        }
    }
    Ok(())
}

/// Removes the files of an earlier run that not every run has.
pub(crate) fn remove_optional_files(dir: &Path) -> Result<(), Error> {
    let graphs = dir.join(graph::DIRECTORY);
    if graphs.is_symlink() {
        // Not the files of another directory.
        remove(&graphs)?;
    }
    for phase in [PHASE_PROMPT, PHASE_GENERATE] {
        remove(&graph::path(dir, phase))?;
    }
    remove(&dir.join(transfers::FILE_NAME))
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
/// `None` where a directory cannot be opened or locked (other systems than Unix, some network file systems): nothing
/// keeps two recorders apart there.
fn lock(dir: &Path) -> Result<Option<File>, Error> {
    let Ok(file) = File::open(dir) else {
        return Ok(None);
    };
    for _ in 0..LOCK_ATTEMPTS {
        match file.try_lock() {
            Ok(()) => return Ok(Some(file)),
            // A reader has the lock for a moment, see `check::unfinished_state`.
            Err(TryLockError::WouldBlock) => std::thread::sleep(LOCK_WAIT),
            Err(TryLockError::Error(_)) => return Ok(None),
        }
    }
    Err(Error::InUse {
        path: dir.to_owned(),
    })
}
