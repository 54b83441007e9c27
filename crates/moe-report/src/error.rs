//! Errors of reports.

use std::io;
use std::path::PathBuf;

/// Reason why an input cannot be read, or a report cannot be written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A run cannot be read.
    #[error(transparent)]
    Trace(#[from] moe_trace::Error),
    /// A trace of another tool or a table cannot be read.
    #[error(transparent)]
    Foreign(#[from] moe_foreign::ForeignError),
    /// The run has neither records nor transfers.
    #[error("{} contains no records; record the run again", path.display())]
    Empty {
        /// The run.
        path: PathBuf,
    },
    /// The selected experts cannot be counted.
    #[error(transparent)]
    Hotness(#[from] moe_analysis::hotness::Error),
    /// The survey of the tokens failed.
    #[error(transparent)]
    Survey(#[from] moe_analysis::survey::Error),
    /// A table cannot be encoded.
    #[error("cannot encode a table of the report: {0}")]
    Parquet(#[from] parquet::errors::ParquetError),
    /// The JSON block cannot be written.
    #[error("cannot write the JSON block of the report: {0}")]
    Json(#[from] serde_json::Error),
    /// The embedded page does not contain a marker, so this program was built from damaged source.
    #[error("the embedded page of the report has no marker {marker}; build the program again")]
    Template {
        /// The marker.
        marker: &'static str,
    },
    /// The report cannot be written.
    #[error(transparent)]
    Write(#[from] io::Error),
}
