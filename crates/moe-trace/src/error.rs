//! What can go wrong with traces, run directories and tables.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parquet::errors::ParquetError;

/// Errors of this crate; each tells what, where and what to do, on one line.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file operation failed.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// On which file.
        path: PathBuf,
        /// Why it failed.
        source: Arc<io::Error>,
    },
    /// A file could not be written to its end.
    #[error("cannot write {}: {source}; make room or choose another place", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// Why it failed.
        source: Arc<io::Error>,
    },
    /// The trace could not be written further.
    #[error(
        "cannot write {} at byte {offset}: {source}; the records before it, {records}, are kept and readable; make room, or bound the trace with --max-trace-mib",
        path.display()
    )]
    WriteTrace {
        /// The trace.
        path: PathBuf,
        /// Where the write failed.
        offset: u64,
        /// Whole records in the file.
        records: u64,
        /// Why it failed.
        source: Arc<io::Error>,
    },
    /// The trace has reached the size that the user allowed.
    #[error("{} has reached its limit of {max_bytes} bytes; raise --max-trace-mib to record more", path.display())]
    TraceFull {
        /// The trace.
        path: PathBuf,
        /// The limit.
        max_bytes: u64,
    },
    /// An output is there already.
    #[error("{} exists; choose another place, or pass --force to replace it", path.display())]
    Exists {
        /// The output.
        path: PathBuf,
    },
    /// Another recorder is writing the run directory.
    #[error("{} is in use by another recorder; wait until it has ended, or choose another place", path.display())]
    InUse {
        /// The directory.
        path: PathBuf,
    },
    /// `--force` does not replace what is no run directory.
    #[error("{} exists and is not a run directory, so --force leaves it alone; choose another place", path.display())]
    NotReplaceable {
        /// The directory or file.
        path: PathBuf,
    },
    /// A directory holds no trace.
    #[error("{} is not a run directory: it has no trace.bin; give the directory that `record` wrote, or a trace.bin", path.display())]
    NotARun {
        /// The directory.
        path: PathBuf,
    },
    /// `manifest.json` is not one.
    #[error("{}: not a manifest that can be read: {reason}; record the run again, or give its trace.bin alone", path.display())]
    Manifest {
        /// The manifest.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A JSON file is not what it should be.
    #[error("{}: not a {what} that can be read or written: {reason}; record the run again", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// What it should be.
        what: &'static str,
        /// What is wrong.
        reason: String,
    },
    /// A line of a text file makes no sense.
    #[error("{}: line {line}: {reason}; mend or remove the line", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// Which line, the first is 1.
        line: u64,
        /// What is wrong.
        reason: String,
    },
    /// The user stopped the work.
    #[error("interrupted; {} was not written", path.display())]
    Interrupted {
        /// What was to be written.
        path: PathBuf,
    },
    /// A record makes no sense.
    #[error("{}: record {record} at byte {}: {reason}", path.display(), record * 1024)]
    Record {
        /// The trace.
        path: PathBuf,
        /// Index of the record.
        record: u64,
        /// What is wrong, and what to do.
        reason: String,
    },
    /// A Parquet file could not be read or written.
    #[error("{}: {reason}", path.display())]
    Parquet {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
}

impl Error {
    /// For `map_err` on a file operation.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io {
            action,
            path: path.to_owned(),
            source: Arc::new(source),
        }
    }

    /// A record that makes no sense.
    pub(crate) fn record(trace: &Path, record: u64, reason: impl Into<String>) -> Self {
        Self::Record {
            path: trace.to_owned(),
            record,
            reason: reason.into(),
        }
    }

    /// For `map_err` on writing a file.
    pub(crate) fn writing(path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Write {
            path: path.to_owned(),
            source: Arc::new(source),
        }
    }

    /// For `map_err` on writing a Parquet file: a failure of the disk is told as such.
    pub(crate) fn writing_parquet(path: &Path) -> impl Fn(ParquetError) -> Self {
        move |source| match source {
            ParquetError::External(source) => match source.downcast::<io::Error>() {
                Ok(source) => Self::writing(path)(*source),
                Err(source) => Self::parquet(path)(source),
            },
            source => Self::parquet(path)(source),
        }
    }

    /// For `map_err` on a Parquet or Arrow operation.
    pub(crate) fn parquet<E: std::fmt::Display>(path: &Path) -> impl Fn(E) -> Self {
        move |source| Self::Parquet {
            path: path.to_owned(),
            reason: one_line(&source.to_string()),
        }
    }
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
