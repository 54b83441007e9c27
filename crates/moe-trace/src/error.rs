//! What can go wrong with traces, run directories and tables.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use moe_gguf::content::Content;
use moe_gguf::text::counted;
#[cfg(feature = "parquet")]
use parquet::errors::ParquetError;

use crate::fault::{LineFault, ManifestFault, RecordFault};
use crate::json;
#[cfg(feature = "parquet")]
use crate::table_fault::TableFault;

/// Errors of this crate; each says on one line what is wrong, where, and what to do.
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
        "cannot write {} at byte {offset}: {source}; the {} before it are kept and readable; make room, or limit the size of the trace",
        path.display(),
        counted(*records, "record")
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
    /// The trace has reached [`RunOptions::max_trace_bytes`](crate::RunOptions::max_trace_bytes).
    #[error("{} has reached its limit of {max_bytes} bytes", path.display())]
    TraceFull {
        /// The trace.
        path: PathBuf,
        /// The limit.
        max_bytes: u64,
    },
    /// An output exists and may not be replaced.
    #[error("{} exists", path.display())]
    Exists {
        /// The output.
        path: PathBuf,
    },
    /// Another recorder is writing the run directory.
    #[error("{} is in use by another recorder; wait until it has ended, or choose another directory", path.display())]
    InUse {
        /// The directory.
        path: PathBuf,
    },
    /// The directory is not a run, which is all that a recorder replaces.
    #[error("{} exists and is not a run directory: {reason}; choose another directory", path.display())]
    NotReplaceable {
        /// The directory or file.
        path: PathBuf,
        /// What a run directory has and it lacks.
        reason: &'static str,
    },
    /// A run was being replaced when its recorder was killed.
    #[error("{} was being replaced when its recorder was killed: trace.bin is the earlier run's unless it is empty; open trace.bin alone, or record the run again", path.display())]
    Replacing {
        /// The directory.
        path: PathBuf,
    },
    /// An output could not be written.
    #[error(transparent)]
    Output(moe_files::Error),
    /// A directory holds no trace.
    #[error("{} is not a run directory: it has no trace.bin; give the directory that `record` wrote, or a trace.bin", path.display())]
    NotARun {
        /// The directory.
        path: PathBuf,
    },
    /// `manifest.json` is not one.
    #[error("{}: not a manifest that can be read: {fault}; record the run again, or give its trace.bin alone", path.display())]
    Manifest {
        /// The manifest.
        path: PathBuf,
        /// What is wrong.
        #[source]
        fault: ManifestFault,
    },
    /// A JSON file is not what it should be.
    #[error("{}: not a {what} that can be read or written: {}; record the run again", path.display(), json::reason_with_place(source))]
    Json {
        /// The file.
        path: PathBuf,
        /// What it should be.
        what: &'static str,
        /// What is wrong.
        source: Arc<serde_json::Error>,
    },
    /// A line of a text file makes no sense.
    #[error("{}: line {line}: {fault}; fix or remove the line", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// Which line, the first is 1.
        line: u64,
        /// What is wrong.
        #[source]
        fault: LineFault,
    },
    /// A file of lines is of another kind: its first line is none of those expected.
    #[error("{}: line {line}: {fault}; the file is not {expected}", path.display())]
    OtherLines {
        /// The file.
        path: PathBuf,
        /// What was expected, and what to give: `the buffers.jsonl of a run: give that file`.
        expected: &'static str,
        /// Which line, the first is 1.
        line: u64,
        /// What is wrong with it.
        #[source]
        fault: LineFault,
    },
    /// A file is of another format.
    #[error("{}: it is {content}, not {expected}", path.display())]
    OtherContent {
        /// The file.
        path: PathBuf,
        /// What was expected, and what to give: `the buffers.jsonl of a run: give that file`.
        expected: &'static str,
        /// What it is.
        content: Content,
    },
    /// A line of a text file is longer than any line of such a file.
    #[error("{}: line {line} is longer than the limit of {limit} bytes; this is not the file expected", path.display())]
    LineTooLong {
        /// The file.
        path: PathBuf,
        /// Which line, the first is 1.
        line: u64,
        /// Bytes that are read at most.
        limit: u64,
    },
    /// A file is larger than any file of its kind.
    #[error("{}: the file is larger than the limit of {limit} bytes; this is not the file expected", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// Bytes that are read at most.
        limit: u64,
    },
    /// A file became smaller while it was read.
    #[error(transparent)]
    Truncated(moe_files::Error),
    /// A JSON document would take more memory than any of its kind.
    #[error("{}: its values would exceed the limit of {limit} bytes of memory; this is not the file expected", path.display())]
    TreeTooLarge {
        /// The file.
        path: PathBuf,
        /// Bytes that its values may take.
        limit: u64,
    },
    /// A text file is not UTF-8.
    #[error("{}: byte {offset} is not UTF-8; save the file as UTF-8", path.display())]
    NotText {
        /// The file.
        path: PathBuf,
        /// The first byte that is not.
        offset: u64,
    },
    /// The user stopped the work.
    #[error("interrupted; {} was not written", path.display())]
    Interrupted {
        /// What was to be written.
        path: PathBuf,
    },
    /// A record makes no sense.
    #[error("{}: record {record} at byte {}: {fault}", path.display(), record * 1024)]
    Record {
        /// The trace.
        path: PathBuf,
        /// Index of the record.
        record: u64,
        /// What is wrong, and what to do.
        #[source]
        fault: RecordFault,
    },
    /// A Parquet file could not be read or written.
    #[cfg(feature = "parquet")]
    #[error("{}: {fault}", path.display())]
    Table {
        /// The file.
        path: PathBuf,
        /// What is wrong, and what to do.
        #[source]
        fault: TableFault,
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
    pub(crate) fn record(trace: &Path, record: u64, fault: RecordFault) -> Self {
        Self::Record {
            path: trace.to_owned(),
            record,
            fault,
        }
    }

    /// For `map_err` on JSON that is read or written; `what` it is.
    pub(crate) fn json(what: &'static str, path: &Path) -> impl FnOnce(serde_json::Error) -> Self {
        move |source| Self::Json {
            path: path.to_owned(),
            what,
            source: Arc::new(source),
        }
    }

    /// For `map_err` on a manifest.
    pub(crate) fn manifest(path: &Path) -> impl Fn(ManifestFault) -> Self {
        move |fault| Self::Manifest {
            path: path.to_owned(),
            fault,
        }
    }

    /// For `map_err` on writing a file.
    pub(crate) fn writing(path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Write {
            path: path.to_owned(),
            source: Arc::new(source),
        }
    }

    /// For `map_err` on writing a Parquet file: a failure of the disk is [`Error::Write`].
    #[cfg(feature = "parquet")]
    pub(crate) fn writing_table<E: Into<ParquetError>>(path: &Path) -> impl Fn(E) -> Self {
        move |source| match source.into() {
            ParquetError::External(source) => match source.downcast::<io::Error>() {
                Ok(source) => Self::writing(path)(*source),
                Err(source) => {
                    let fault = TableFault::Encode(Arc::new(ParquetError::External(source)));
                    Self::table(path)(fault)
                }
            },
            source => Self::table(path)(TableFault::Encode(Arc::new(source))),
        }
    }

    /// For `map_err` on a Parquet file.
    #[cfg(feature = "parquet")]
    pub(crate) fn table(path: &Path) -> impl Fn(TableFault) -> Self {
        move |fault| Self::Table {
            path: path.to_owned(),
            fault,
        }
    }
}

impl From<moe_files::Error> for Error {
    fn from(error: moe_files::Error) -> Self {
        match error {
            moe_files::Error::Exists { path } => Self::Exists { path },
            moe_files::Error::Io {
                action,
                path,
                source,
            } => Self::Io {
                action,
                path,
                source,
            },
            error => Self::Output(error),
        }
    }
}
