//! The error type for traces, run directories and tables.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use moe_files::text::counted;
use moe_gguf::content::Content;
#[cfg(feature = "parquet")]
use parquet::errors::ParquetError;

use crate::fault::{LineFault, ManifestFault, RecordFault};
use crate::json;
#[cfg(feature = "parquet")]
use crate::table_fault::TableFault;

/// Errors of this crate. Each message is one line: where, what is wrong, and what to do.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file operation failed.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// The failed operation, as an infinitive: `open`.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        source: Arc<io::Error>,
    },
    /// A file could not be written completely.
    #[error("cannot write {}: {source}; free disk space or choose another directory", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: Arc<io::Error>,
    },
    /// A write to the trace failed.
    #[error(
        "cannot write {} at byte {offset}: {source}; the {} before it are complete and readable; free disk space, or limit the size of the trace",
        path.display(),
        counted(*records, "record")
    )]
    WriteTrace {
        /// The trace.
        path: PathBuf,
        /// File offset at which the write failed.
        offset: u64,
        /// Number of complete records in the file.
        records: u64,
        /// The cause.
        source: Arc<io::Error>,
    },
    /// The compressed records of a killed recorder cannot be copied to a temporary file.
    #[error("{} cannot be expanded to a temporary file: {source}; the directory for temporary files ($TMPDIR) must exist \
        and have room for the complete trace", path.display())]
    Expand {
        /// The compressed file.
        path: PathBuf,
        /// The cause.
        source: Arc<io::Error>,
    },
    /// The trace has reached [`RunOptions::max_trace_bytes`](crate::RunOptions::max_trace_bytes).
    #[error("{} has reached its limit of {max_bytes} bytes", path.display())]
    TraceFull {
        /// The trace.
        path: PathBuf,
        /// The limit in bytes.
        max_bytes: u64,
    },
    /// An output exists, and the caller does not allow its replacement.
    #[error("{} exists", path.display())]
    Exists {
        /// The output.
        path: PathBuf,
    },
    /// Another recorder is writing the run directory.
    #[error("{} is in use by another recorder; wait until it ends, or choose another directory", path.display())]
    InUse {
        /// The directory.
        path: PathBuf,
    },
    /// The path exists and is not a run directory. A recorder replaces run directories only.
    #[error("{} exists and is not a run directory: {reason}; choose another directory", path.display())]
    NotReplaceable {
        /// The directory or file.
        path: PathBuf,
        /// What is missing or different.
        reason: &'static str,
    },
    /// The recorder was killed while it replaced the run.
    #[error("{}: the recorder was killed while it replaced this run: trace.bin, unless empty, belongs to the earlier run; open trace.bin alone, or record the run again", path.display())]
    Replacing {
        /// The directory.
        path: PathBuf,
    },
    /// An output could not be written.
    #[error(transparent)]
    Output(moe_files::Error),
    /// A directory contains no trace.
    #[error("{} is not a run directory: it has no trace.bin; pass the directory that `record` wrote, or a trace.bin", path.display())]
    NotARun {
        /// The directory.
        path: PathBuf,
    },
    /// `manifest.json` is not a manifest.
    #[error("{}: not a readable manifest: {fault}; record the run again, or pass only its trace.bin", path.display())]
    Manifest {
        /// The manifest.
        path: PathBuf,
        /// What is wrong.
        #[source]
        fault: ManifestFault,
    },
    /// A JSON file does not have the expected contents.
    #[error("{}: not a valid {what}: {}; record the run again", path.display(), json::reason_with_location(source))]
    Json {
        /// The file.
        path: PathBuf,
        /// The expected contents, as a noun: `graph`.
        what: &'static str,
        /// What is wrong.
        source: Arc<serde_json::Error>,
    },
    /// A line of a text file is invalid.
    #[error("{}: line {line}: {fault}; fix or remove the line", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// Number of the line, from 1.
        line: u64,
        /// What is wrong.
        #[source]
        fault: LineFault,
    },
    /// The first line of a text file shows that the file has another format.
    #[error("{}: line {line}: {fault}; the file is not {expected}", path.display())]
    OtherLines {
        /// The file.
        path: PathBuf,
        /// The expected file, and what to give: `the buffers.jsonl of a run: give that file`.
        expected: &'static str,
        /// Number of the line, from 1.
        line: u64,
        /// What is wrong with it.
        #[source]
        fault: LineFault,
    },
    /// A file has another format.
    #[error("{}: it is {content}, not {expected}", path.display())]
    OtherContent {
        /// The file.
        path: PathBuf,
        /// The expected file, and what to give: `the buffers.jsonl of a run: give that file`.
        expected: &'static str,
        /// The format of the file.
        content: Content,
    },
    /// A line of a text file is longer than the limit.
    #[error("{}: line {line} is longer than the limit of {limit} bytes; this is not the expected file", path.display())]
    LineTooLong {
        /// The file.
        path: PathBuf,
        /// Number of the line, from 1.
        line: u64,
        /// The limit in bytes.
        limit: u64,
    },
    /// A file is larger than the limit.
    #[error("{}: the file is larger than the limit of {limit} bytes; this is not the expected file", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// The limit in bytes.
        limit: u64,
    },
    /// A file was truncated while it was read.
    #[error(transparent)]
    Truncated(moe_files::Error),
    /// A JSON document would take more memory than the limit.
    #[error("{}: the JSON values would take more memory than the limit of {limit} bytes; this is not the expected file", path.display())]
    TreeTooLarge {
        /// The file.
        path: PathBuf,
        /// The limit in bytes.
        limit: u64,
    },
    /// A text file is not UTF-8.
    #[error("{}: byte {offset} is not UTF-8; save the file as UTF-8", path.display())]
    NotText {
        /// The file.
        path: PathBuf,
        /// File offset of the first invalid byte.
        offset: u64,
    },
    /// The user interrupted the operation.
    #[error("interrupted; {} was not written", path.display())]
    Interrupted {
        /// The file that was not written.
        path: PathBuf,
    },
    /// A record is invalid.
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

    /// An invalid record.
    pub(crate) fn record(trace: &Path, record: u64, fault: RecordFault) -> Self {
        Self::Record {
            path: trace.to_owned(),
            record,
            fault,
        }
    }

    /// For `map_err` on JSON that is read or written. `what` is the expected contents.
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

    /// For `map_err` on writing a Parquet file. An I/O error becomes [`Error::Write`].
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
