//! The GPUs of a run and their settings.

use serde::{Deserialize, Serialize};

/// A GPU in the device list of a run. A physical GPU that is listed twice has two entries.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Gpu {
    /// Name in the device list, as in `buffers.jsonl`: `CUDA0`; missing if unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// The driver's index of the physical GPU, from 0; missing if unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ordinal: Option<u64>,
    /// Product name.
    pub name: String,
    /// Size of its memory in bytes.
    pub memory_bytes: u64,
    /// Driver version.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub driver: Option<String>,
    /// Memory limit of the run in bytes; missing if unlimited.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit_bytes: Option<u64>,
    /// Peak memory use of the run in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peak_bytes: Option<u64>,
    /// Size of Post-Fetch's scratchpad in bytes; missing for other policies.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scratchpad_bytes: Option<u64>,
    /// Work that fell back to the CPU; missing if it was not counted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fallbacks: Option<Fallbacks>,
    /// Minimum batch size in tokens for copying weights from CPU memory to the GPU for a matrix multiplication, as in ggml's
    /// `op_offload`. 0: never copied. Missing if unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub offload_min_batch: Option<u64>,
    /// Settings of Post-Fetch; missing for other policies.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub post_fetch: Option<PostFetch>,
}

/// Work of a GPU that fell back to the CPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Fallbacks {
    /// Number of failed operations, plus layers in which some transfers did not start.
    pub operations: u64,
    /// Number of tensors that did not fit into its memory.
    pub tensors: u64,
    /// The first error, if any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_error: Option<String>,
}

/// The effective settings of [Post-Fetch](https://github.com/ernestuz-b/llama-prefetch.cpp), named like its environment
/// variables (`LLAMA_POSTFETCH_…`).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PostFetch {
    /// Whether Post-Fetch was enabled.
    pub enable: bool,
    /// Whether all experts were computed on the CPU, without transfers.
    pub force_cpu: bool,
    /// Whether computation waited for transfers that were not complete in time.
    pub block_on_miss: bool,
    /// Maximum number of transfers for a layer.
    pub max_transfers: u64,
    /// Size of the scratchpad (the GPU memory for the transfers of a layer) in MiB; 0: as large as needed.
    pub scratchpad_mb: u64,
    /// Whether transfers used a separate stream.
    pub use_dedicated_streams: bool,
    /// Number of experts for a token whose gate and up projections the CPU computed; 0: all.
    pub cpu_limit: u64,
}
