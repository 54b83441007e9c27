//! The hot expert cache of a run: its part of the manifest, and `perf.json`, the counters of the run.

use std::collections::BTreeMap;

use moe_ids::{ExpertId, LayerId};
use serde::{Deserialize, Serialize};

/// Name of the file with counters in a run directory: a learn file of the hot expert cache
/// (`schemas/perf.schema.json`). Only runs with a hot expert cache have it.
pub const PERF_FILE: &str = "perf.json";

/// The hot expert cache of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct HotCache {
    /// Path of the plan, the learn file or the trace that the cache was planned from.
    pub source: String,
    /// Kind of the source: `plan`, `learn` (a learn file or a trace), or `auto-learn` (a learn file that the run has written).
    pub kind: String,
    /// Distribution of the experts over the lanes (`warm`, `hot-even` or `even-split`).
    pub strategy: String,
    /// Function that computes scores from selections (`flat`, `pressure`, ...).
    pub weighting: String,
    /// Strength of the layer weights, 0 to 1.
    pub layer_curve: f64,
    /// Whether experts without selections filled free memory.
    pub fill_random: bool,
    /// The lanes at the start of the run.
    pub lanes: Vec<HotLane>,
    /// What was counted: `off`, `update` or `full`.
    pub perf: String,
    /// Rule for exchanges: `fork` or `payback`.
    pub update_policy: String,
    /// Maximum fraction of the cached experts that were exchanged at a time, 0 to 1.
    pub update_rate: f64,
    /// When experts were exchanged: `request`, after each request, or `prompt`, after its prompt.
    pub update_after: String,
    /// The requests (sequences) in order; empty if nothing was counted.
    pub requests: Vec<HotRequest>,
    /// Work that the CPU did instead of a lane; missing while recording.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failures: Option<HotFailures>,
}

/// A lane of a hot expert cache: experts on one device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct HotLane {
    /// Device of the lane: `CPU`, `CUDA0`, ...
    pub device: String,
    /// Budget in bytes.
    pub budget_bytes: u64,
    /// Planned bytes, including an empty expert for each layer.
    pub planned_bytes: u64,
    /// Allocated bytes.
    pub bytes: u64,
    /// Planned experts of each layer, highest rank first.
    pub experts: BTreeMap<LayerId, Vec<ExpertId>>,
}

/// A request that used a hot expert cache.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct HotRequest {
    /// Expert slots that the hot lanes computed.
    pub hot_slots: u64,
    /// Expert slots that the cold lane computed.
    pub cold_slots: u64,
    /// Experts that were exchanged after the request, or after its prompt.
    pub exchanged: u64,
}

/// Work that the CPU did instead of a lane.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct HotFailures {
    /// Layers of lanes whose experts could not be copied at the start.
    pub layers: u64,
    /// Calls of lanes that failed.
    pub calls: u64,
    /// Experts that an exchange could not copy.
    pub exchanges: u64,
    /// Message of the first failure, if any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_error: Option<String>,
}
