//! Causes of an [`Error`](crate::Error) that names a line, a record or a manifest.

use std::sync::Arc;

use moe_files::text::counted;
use moe_ids::ExpertId;

use crate::json;
use crate::manifest::SCHEMA;
use crate::record::{EXT_V1, MAX_EXPERTS, MAX_SOURCES, lane};

/// Why a manifest is invalid.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ManifestFault {
    /// It is not JSON, or the JSON has other keys or types.
    #[error("{}", json::reason_with_location(.0))]
    Json(#[source] Arc<serde_json::Error>),
    /// It has no schema: another program wrote the file.
    #[error("the key \"schema\" is missing; it must be {SCHEMA:?}")]
    NoSchema,
    /// Its schema is unknown.
    #[error("schema is {found:?}, but this version reads {SCHEMA:?}")]
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

/// Why a line of JSON is invalid.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LineFault {
    /// It is not JSON, or the JSON has other keys or types.
    #[error("{}", json::reason(.0))]
    Json(#[source] Arc<serde_json::Error>),
    /// It is an inconsistent transfer.
    #[error(transparent)]
    Transfer(#[from] TransferFault),
}

/// Why a line of `transfers.jsonl` is inconsistent.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // The fields are those of `Transfer`.
pub enum TransferFault {
    /// More experts were copied than the router selected.
    #[error("n_fetched {n_fetched} is more than n_experts {n_experts}")]
    Fetched { n_fetched: u32, n_experts: u32 },
    /// No expert was selected.
    #[error("n_experts is 0, but the router of a layer selects at least one expert")]
    NoExperts,
    /// More bytes than the limit for a layer.
    #[error("bytes is {bytes}, above the limit of {limit} for a layer")]
    Bytes { bytes: u64, limit: u64 },
    /// The times of a transfer are set, but it has no bytes.
    #[error("bytes is 0, but the times of a transfer are set")]
    EmptyTransfer,
    /// Bytes were copied, but the times of the transfer are missing.
    #[error("bytes is {bytes}, but the times of the transfer are missing")]
    NoTransfer { bytes: u64 },
    /// The GPU computed experts, but no bytes were copied.
    #[error("n_fetched is {n_fetched}, but bytes is 0: fetched experts have bytes")]
    FetchedNothing { n_fetched: u32 },
    /// A time span ends before it starts.
    #[error("{span} ends at {end_ns}, before its start at {start_ns}")]
    Span {
        /// `transfer`, `window` or `product`.
        span: &'static str,
        start_ns: u64,
        end_ns: u64,
    },
}

/// Why a record is invalid, and what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RecordFault {
    /// Its extension has an unknown version.
    #[error(
        "unknown ext_version {found}: this version reads up to {EXT_V1}; use a newer version of this software"
    )]
    Version {
        /// `ext_version`.
        found: u8,
    },
    /// It has more sources or experts than a record can contain.
    #[error(
        "it has {} and {}, but a record contains at most {MAX_SOURCES} and {MAX_EXPERTS}; the trace is damaged",
        counted(*sources, "source"), counted(*experts, "expert")
    )]
    Counts {
        /// `num_sources`.
        sources: u8,
        /// `num_experts`.
        experts: u8,
    },
    /// Its phase is unknown.
    #[error("phase {phase} is neither 0 (prompt) nor 1 (generate)")]
    Phase {
        /// `phase`.
        phase: u8,
    },
    /// It has selected experts, but no layer.
    #[error("it has selected experts, but no layer")]
    NoLayer,
    /// The lane of one of its experts is unknown.
    #[error("lane {lane} is out of range (0..={})", lane::NAMES.len() - 1)]
    Lane {
        /// `expert_lane`.
        lane: u8,
    },
    /// One of its sources is invalid.
    #[error("source {source_index}: {fault}")]
    Source {
        /// Index among the record's sources.
        source_index: usize,
        /// What is wrong with it.
        #[source]
        fault: SourceFault,
    },
}

/// Why a source of a record is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SourceFault {
    /// Its memory source is unknown.
    #[error("memory source {memory_source} is neither 0 (disk) nor 1 (buffer)")]
    MemorySource {
        /// `memory_source`.
        memory_source: u8,
    },
    /// Its end exceeds 64 bits.
    #[error("{size_bytes} bytes at offset {offset} end beyond 64 bits")]
    Overflow {
        /// Number of bytes.
        size_bytes: u64,
        /// Offset of the first byte.
        offset: u64,
    },
    /// The bytes are not in the tensor that the source names.
    #[error(
        "{size_bytes} bytes at offset {offset} are not in tensor {tensor_idx} ({name:?}) of gguf-map.parquet; check that the map belongs to this model"
    )]
    OtherTensor {
        /// Number of bytes.
        size_bytes: u64,
        /// Offset of the first byte.
        offset: u64,
        /// The tensor's name.
        name: String,
        /// Its index in the map.
        tensor_idx: u32,
    },
    /// The tensor does not have the expert.
    #[error(
        "expert {expert} is not in its tensor of {n_expert} experts; check that the map belongs to this model"
    )]
    NoExpert {
        /// The expert.
        expert: ExpertId,
        /// Number of experts of the tensor.
        n_expert: u64,
    },
}
