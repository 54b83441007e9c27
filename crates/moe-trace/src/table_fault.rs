//! Causes of an [`Error`](crate::Error) about a Parquet file.

use std::sync::Arc;

use arrow::datatypes::DataType;
use parquet::errors::ParquetError;

use crate::json;

/// Why a Parquet file cannot be read or written, and what to do.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TableFault {
    /// The Parquet library cannot decode the file.
    #[error("the file is damaged: {}; write it again or get a new copy", one_line(.0))]
    Damaged(#[source] Arc<ParquetError>),
    /// The Parquet library panicked while it decoded the file.
    #[error("the file is damaged: its pages are inconsistent; write it again or get a new copy")]
    DecoderPanicked,
    /// A page whose header cannot be read.
    #[error(
        "the file is damaged: column {column}: no page header at byte {offset}; write it again or get a new copy"
    )]
    PageHeader {
        /// The column.
        column: String,
        /// File offset at which the header is expected.
        offset: u64,
    },
    /// A page, or pages that are needed together, take too much memory.
    #[error(
        "column {column}: pages of {bytes} bytes, decompressed, are larger than the limit of {limit}; write the table with smaller pages"
    )]
    Pages {
        /// The column.
        column: String,
        /// Size of the pages according to their headers, in bytes.
        bytes: u64,
        /// The limit in bytes.
        limit: u64,
    },
    /// A column of strings in an encoding whose memory cannot be bounded.
    #[error(
        "column {column}: the encoding {encoding} is not supported; write the table with dictionaries or plain strings"
    )]
    Encoding {
        /// The column.
        column: String,
        /// The encoding.
        encoding: &'static str,
    },
    /// A column with an unsupported compression.
    #[error(
        "column {column}: the compression {codec} is not supported; write the table with zstd, snappy or no compression"
    )]
    Codec {
        /// The column.
        column: String,
        /// The compression.
        codec: String,
    },
    /// Two columns with the same name.
    #[error("column {column} appears twice; write the table again with unique column names")]
    RepeatedColumn {
        /// The column.
        column: String,
    },
    /// A column of lists or structures instead of plain values.
    #[error(
        "column {column}: lists and structures are not supported; this is not the expected table"
    )]
    Nested {
        /// The column.
        column: String,
    },
    /// A footer above the size limit.
    #[error(
        "the footer has {bytes} bytes, more than the limit of {limit}; write the table with fewer row groups"
    )]
    Footer {
        /// Size of the footer in bytes.
        bytes: u64,
        /// The limit in bytes.
        limit: u64,
    },
    /// A name that is longer than the limit.
    #[error(
        "column {column}: a name of {bytes} bytes is longer than the limit of {limit}; this is not the expected table"
    )]
    LongName {
        /// The column.
        column: String,
        /// Length of the name in bytes.
        bytes: usize,
        /// The limit in bytes.
        limit: usize,
    },
    /// More rows than the limit for this kind of table.
    #[error("the table has more rows than the limit of {limit}; this is not the expected table")]
    Rows {
        /// The limit in rows.
        limit: usize,
    },
    /// The Parquet library cannot write the file.
    #[error("{}", one_line(.0))]
    Encode(#[source] Arc<ParquetError>),
    /// A value of the file's metadata is not the expected JSON.
    #[error("metadata {key}: {}; write the file again", json::reason(source))]
    Metadata {
        /// The key.
        key: &'static str,
        /// The error in its value.
        source: Arc<serde_json::Error>,
    },
    /// A column is missing.
    #[error("column {column} is missing; this is not the expected table")]
    NoColumn {
        /// The column.
        column: String,
    },
    /// A column whose type cannot be converted.
    #[error("column {column}: values of type {from} cannot be converted; write the column as {to}")]
    Type {
        /// The column.
        column: String,
        /// Its type.
        from: DataType,
        /// The expected type.
        to: DataType,
    },
    /// A value that does not fit its column's type.
    #[error("column {column}: a value does not fit {data_type}; write the table again")]
    Range {
        /// The column.
        column: String,
        /// The type.
        data_type: DataType,
    },
    /// A weight that no router applies.
    #[error(
        "row {row}: the router weight {weight} is not a finite number of at least 0; write the table again"
    )]
    Weight {
        /// The row, from 0.
        row: u64,
        /// The weight.
        weight: f32,
    },
    /// A null in a column that is not nullable.
    #[error("column {column}: a value is missing; write the table again")]
    Null {
        /// The column.
        column: String,
    },
    /// An unknown name in a column with a fixed set of names.
    #[error("column {column}: the value {name:?} is unknown; write the table again")]
    Name {
        /// The column.
        column: String,
        /// The name.
        name: String,
    },
    /// A dictionary key that is outside the dictionary.
    #[error("column {column}: a key is outside its dictionary; write the table again")]
    Key {
        /// The column.
        column: String,
    },
    /// A byte range whose end exceeds 64 bits.
    #[error("row {row}: its range ends beyond 64 bits; write the table again")]
    Overflow {
        /// The row.
        row: usize,
    },
    /// The map belongs to another model than the run.
    #[error("the map belongs to another model than the run; write the map of the run's model")]
    OtherModel,
    /// The table was written for another run.
    #[error("the table belongs to run {run_id}, not to this one; write it again")]
    OtherRun {
        /// The run of the table.
        run_id: String,
    },
    /// A directory without a `routing` table.
    #[error(
        "the directory contains neither routing.parquet nor routing/run=ID/*.parquet; write the tables of a run"
    )]
    NoRouting,
}

impl TableFault {
    /// The fault for an error of the decoder.
    pub(crate) fn damaged(error: impl Into<ParquetError>) -> Self {
        Self::Damaged(Arc::new(error.into()))
    }
}

/// The error message on one line: some messages of the Parquet library contain line breaks.
fn one_line(error: &ParquetError) -> String {
    let text = error.to_string();
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
