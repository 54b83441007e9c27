//! What is wrong with a Parquet file.

use std::sync::Arc;

use arrow::datatypes::DataType;
use arrow::error::ArrowError;
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
    #[error(
        "the file is damaged: its pages contradict each other; write it again or get a new copy"
    )]
    DecoderPanicked,
    /// A page whose header cannot be read.
    #[error(
        "the file is damaged: column {column}: no page header at byte {offset}; write it again or get a new copy"
    )]
    PageHeader {
        /// The column.
        column: String,
        /// Where the header should be.
        offset: u64,
    },
    /// A page, or pages that are needed at the same time, take too much memory.
    #[error(
        "column {column}: pages of {bytes} bytes, decompressed, are larger than the limit of {limit}; write the table with smaller pages"
    )]
    Pages {
        /// The column.
        column: String,
        /// Bytes that the pages claim.
        bytes: u64,
        /// Bytes that are read at most.
        limit: u64,
    },
    /// A column of strings in an encoding whose memory cannot be bounded.
    #[error(
        "column {column}: pages in the encoding {encoding} are not read; write the table with dictionaries or plain strings"
    )]
    Encoding {
        /// The column.
        column: String,
        /// The encoding.
        encoding: &'static str,
    },
    /// A column that is compressed in a way that is not read.
    #[error(
        "column {column}: compression {codec} is not read; write the table with zstd, snappy or no compression"
    )]
    Codec {
        /// The column.
        column: String,
        /// The compression.
        codec: String,
    },
    /// Two columns of one name.
    #[error(
        "column {column} appears twice: it is unknown which of them to read; write the table again"
    )]
    RepeatedColumn {
        /// The column.
        column: String,
    },
    /// A column of lists or structures, where values are expected.
    #[error(
        "column {column}: lists and structures are not read; this is not the table that is wanted"
    )]
    Nested {
        /// The column.
        column: String,
    },
    /// A footer that takes too much memory.
    #[error(
        "the footer claims {bytes} bytes, more than the limit of {limit}; write the table with fewer row groups"
    )]
    Footer {
        /// Bytes of the footer.
        bytes: u64,
        /// Bytes that are read at most.
        limit: u64,
    },
    /// A name that is longer than any name of its kind.
    #[error(
        "column {column}: a name of {bytes} bytes is longer than the limit of {limit}; this is not the table that is wanted"
    )]
    LongName {
        /// The column.
        column: String,
        /// Bytes of the name.
        bytes: usize,
        /// Longest name that is read.
        limit: usize,
    },
    /// More rows than a table of this kind has.
    #[error("more than {limit} rows, which no table of this kind has; write it again")]
    Rows {
        /// Rows that are read at most.
        limit: usize,
    },
    /// The Parquet library cannot write the file.
    #[error("{}", one_line(.0))]
    Encode(#[source] Arc<ParquetError>),
    /// A value of the file's metadata is not the JSON expected.
    #[error("metadata {key}: {}; write the file again", json::reason(source))]
    Metadata {
        /// The key.
        key: &'static str,
        /// What is wrong with its value.
        source: Arc<serde_json::Error>,
    },
    /// A column is missing.
    #[error("no column {column}; this is not the table that is wanted")]
    NoColumn {
        /// The column.
        column: String,
    },
    /// A column of a type that cannot be converted.
    #[error("column {column}: {source}; write the table again")]
    Type {
        /// The column.
        column: String,
        /// Why it cannot be converted.
        source: Arc<ArrowError>,
    },
    /// A value that does not fit its column's type.
    #[error("column {column}: a value does not fit {data_type}; write the table again")]
    Range {
        /// The column.
        column: String,
        /// The type.
        data_type: DataType,
    },
    /// A null where there must be a value.
    #[error("column {column}: a value is missing; write the table again")]
    Null {
        /// The column.
        column: String,
    },
    /// A name that is none of those that the column may hold.
    #[error("column {column}: {name:?} is not known; write the table again")]
    Name {
        /// The column.
        column: String,
        /// The name.
        name: String,
    },
    /// A dictionary without one of the keys that are used.
    #[error("column {column}: a key is outside its dictionary; write the table again")]
    Key {
        /// The column.
        column: String,
    },
    /// A range of bytes whose end cannot be counted.
    #[error("row {row}: its range ends beyond 64 bits; write the table again")]
    Overflow {
        /// The row.
        row: usize,
    },
    /// The map of another model than the run's.
    #[error(
        "it is the map of another model than the run's; write the right one with `moe-analyze gguf-map`"
    )]
    OtherModel,
    /// A directory without a table of routing.
    #[error(
        "no routing.parquet and no routing/run=ID/*.parquet in it; write them with `moe-analyze parquet`"
    )]
    NoRouting,
}

impl TableFault {
    /// A failure of the decoder.
    pub(crate) fn damaged(error: impl Into<ParquetError>) -> Self {
        Self::Damaged(Arc::new(error.into()))
    }
}

/// The Parquet library breaks lines in the messages of some errors.
fn one_line(error: &ParquetError) -> String {
    let text = error.to_string();
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
