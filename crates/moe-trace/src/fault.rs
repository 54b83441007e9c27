//! What is wrong at a place that an [`Error`](crate::Error) names: a line, a record, a table.

use std::sync::Arc;

use arrow::datatypes::DataType;
use arrow::error::ArrowError;
use moe_gguf::text::counted;
use parquet::errors::ParquetError;

use crate::manifest::SCHEMA;
use crate::record::{EXT_V1, MAX_EXPERTS, MAX_SOURCES, lane};

/// Why a manifest is refused.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ManifestFault {
    /// It is not the JSON expected.
    #[error("{0}")]
    Json(#[source] Arc<serde_json::Error>),
    /// It has no schema: the file is of another program.
    #[error("it has no \"schema\", which is {SCHEMA:?}")]
    NoSchema,
    /// Its schema is another one.
    #[error("its schema is {found:?}, this version reads {SCHEMA:?}")]
    Schema {
        /// The value of `schema`.
        found: String,
    },
}

impl From<serde_json::Error> for ManifestFault {
    fn from(error: serde_json::Error) -> Self {
        Self::Json(Arc::new(error))
    }
}

/// Why a line of JSON is refused.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LineFault {
    /// It is not the JSON expected.
    #[error("{0}")]
    Json(#[source] Arc<serde_json::Error>),
    /// It is a transfer that contradicts itself.
    #[error(transparent)]
    Transfer(#[from] TransferFault),
}

/// Why a line of `transfers.jsonl` contradicts itself.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // the fields are those of a transfer
pub enum TransferFault {
    /// The phase does not exist.
    #[error("phase {phase} is out of range: 0 is the prompt, 1 generated")]
    Phase { phase: u8 },
    /// More experts were copied than the router selected.
    #[error("n_fetched {n_fetched} is more than n_experts {n_experts}")]
    Fetched { n_fetched: u32, n_experts: u32 },
    /// No expert was selected.
    #[error("n_experts is 0, but the router of a layer selects at least one expert")]
    NoExperts,
    /// More bytes than a layer has.
    #[error("bytes {bytes} is more than any layer has ({limit})")]
    Bytes { bytes: u64, limit: u64 },
    /// A time of a transfer without its bytes.
    #[error("bytes is 0, but there is a transfer")]
    EmptyTransfer,
    /// Bytes without the time of their transfer.
    #[error("bytes is {bytes}, but there is no transfer")]
    NoTransfer { bytes: u64 },
    /// The GPU computed experts whose bytes were not copied.
    #[error("n_fetched is {n_fetched}, but bytes is 0: what the GPU computed was copied to it")]
    FetchedNothing { n_fetched: u32 },
    /// A span of time ends before it starts.
    #[error("{span} ends at {end_ns}, before its start at {start_ns}")]
    Span {
        /// `transfer`, `window` or `product`.
        span: &'static str,
        start_ns: u64,
        end_ns: u64,
    },
}

/// Why a record makes no sense, and what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RecordFault {
    /// Its extension is of a later version.
    #[error(
        "ext_version {found} is not known, this version reads up to {EXT_V1}; read it with a newer moe-analyze"
    )]
    Version {
        /// `ext_version`.
        found: u8,
    },
    /// It counts more sources or experts than a record holds.
    #[error(
        "it counts {} and {}, a record holds {MAX_SOURCES} and {MAX_EXPERTS}; the trace is damaged",
        counted(*sources, "source"), counted(*experts, "expert")
    )]
    Counts {
        /// `num_sources`.
        sources: u8,
        /// `num_experts`.
        experts: u8,
    },
    /// Its phase does not exist.
    #[error("phase {phase} is neither 0 (prompt) nor 1 (generate)")]
    Phase {
        /// `phase`.
        phase: u8,
    },
    /// It selects experts outside of a layer.
    #[error("experts were selected, but in no layer")]
    NoLayer,
    /// One of its experts was computed on a lane that does not exist.
    #[error("lane {lane} is not known; the last one is {}", lane::NAMES.len() - 1)]
    Lane {
        /// `expert_lane`.
        lane: u8,
    },
    /// One of its sources cannot be.
    #[error("source {source_index}: {fault}")]
    Source {
        /// Place among the record's sources.
        source_index: usize,
        /// What is wrong with it.
        #[source]
        fault: SourceFault,
    },
}

/// Why a source of a record makes no sense.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SourceFault {
    /// Its memory does not exist.
    #[error("memory source {memory_source} is neither 0 (disk) nor 1 (buffer)")]
    MemorySource {
        /// `memory_source`.
        memory_source: u8,
    },
    /// Its last byte cannot be counted.
    #[error("{size_bytes} bytes at {offset} end beyond 64 bits")]
    Overflow {
        /// Bytes that were read.
        size_bytes: u64,
        /// The first of them.
        offset: u64,
    },
    /// The range is not inside the tensor that the source names.
    #[error(
        "{size_bytes} bytes at {offset} are not those of {name:?} (tensor {tensor_idx}) in gguf-map.parquet; is this the model's map?"
    )]
    OtherTensor {
        /// Bytes that were read.
        size_bytes: u64,
        /// The first of them.
        offset: u64,
        /// The tensor's name.
        name: String,
        /// Its index in the map.
        tensor_idx: u32,
    },
    /// An expert that its tensor does not have.
    #[error("expert {expert} is not in its tensor, which has {n_expert}; is this the model's map?")]
    NoExpert {
        /// The expert.
        expert: u32,
        /// Experts of the tensor.
        n_expert: u64,
    },
}

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
    #[error("metadata {key}: {source}; write the file again")]
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
    /// A name that the column may not hold.
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
    /// A thread that wrote the table panicked.
    #[error("a worker panicked; please report this")]
    WorkerPanicked,
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
