//! What is wrong at a place that an [`Error`](crate::Error) names: a line, a record.

use std::sync::Arc;

use moe_gguf::text::counted;
use moe_ids::ExpertId;

use crate::json;
use crate::manifest::SCHEMA;
use crate::record::{EXT_V1, MAX_EXPERTS, MAX_SOURCES, lane};

/// Why a manifest is refused.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ManifestFault {
    /// It is not the JSON expected.
    #[error("{}", json::reason_with_place(.0))]
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
    #[error("{}", json::reason(.0))]
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
        expert: ExpertId,
        /// Experts of the tensor.
        n_expert: u64,
    },
}
