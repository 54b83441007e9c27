//! The dynamic expert cache of a run: its part of the manifest.

use serde::{Deserialize, Serialize};

/// The dynamic expert cache of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DynamicCache {
    /// Cache policy, by its name in `simulate` (`lru`, `layerlfu`, ...).
    pub policy: String,
    /// Predictor of the experts to prefetch, by its name in `simulate`; missing without prefetching.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub predictor: Option<String>,
    /// Number of layers between a prediction and the predicted layer.
    pub depth: u64,
    /// Number of experts to predict; missing: as many as the predicting layer has selected.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub n_predict: Option<u64>,
    /// Device of the slots: `CPU`, `CUDA0`, ...
    pub device: String,
    /// Budget in bytes.
    pub budget_bytes: u64,
    /// Slots for the budget.
    pub n_slots: u64,
    /// Slots for prefetched experts, in addition to the budget.
    pub n_prefetch_slots: u64,
    /// Allocated bytes.
    pub bytes: u64,
    /// What was counted in `perf.json`: `off`, `update` or `full`.
    pub perf: String,
    /// Counts of the run; missing while recording.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub counts: Option<Counts>,
    /// Work that the CPU did instead; missing while recording.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failures: Option<Failures>,
}

/// Counts of a dynamic cache. Arrays are by phase: `[prompt, generate]`. A lookup is one distinct expert of a layer in one pass.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Counts {
    /// Lookups.
    pub look_ups: [u64; 2],
    /// Lookups of experts that the cache contained.
    pub hits: [u64; 2],
    /// Bytes of the other experts, whether they were prefetched or not.
    pub missed_bytes: [u64; 2],
    /// Evicted experts.
    pub evictions: u64,
    /// Lookups without a free slot: the CPU computed these experts.
    pub without_slot: u64,
    /// Prefetches of generated tokens; missing without a predictor.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefetch: Option<Prefetch>,
}

/// Prefetches of generated tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Prefetch {
    /// Misses whose prefetch was complete when the layer needed the expert.
    pub timely: u64,
    /// Misses whose prefetch was in flight: the layer waited for it.
    pub late: u64,
    /// Misses that were not prefetched.
    pub missed: u64,
    /// Prefetched experts that were not used.
    pub wasted: u64,
    /// Predicted experts, whether or not the cache contained them.
    pub predicted: u64,
    /// Predicted experts that were selected.
    pub correct: u64,
    /// Bytes of misses and prefetches.
    pub moved_bytes: u64,
}

/// Work that the CPU did instead of the slots.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Failures {
    /// Layers whose slots could not be allocated.
    pub layers: u64,
    /// Calls of layers that failed.
    pub calls: u64,
    /// Copies that failed.
    pub copies: u64,
    /// Message of the first failure, if any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_error: Option<String>,
}
