//! The hot expert cache: copies of selected experts on fast devices. The system is that of
//! [adrianhoehne/llama.cpp](https://github.com/adrianhoehne/llama.cpp).
//!
//! ```text
//! ids, router weights ──► LaneWorklist ──► hot lanes (GPUs, or copies in CPU memory) ──┐
//!                                     └──► cold lane (CPU, weights of the file) ───────┴──► sum
//! ```
//!
//! - A *lane* contains experts of some layers on one device. It computes the sum of its experts of each token, multiplied by
//!   their router weights. The results of all lanes are added.
//! - Experts that are in no hot lane are *cold*: the CPU computes them with the weights of the file. For batches of at least
//!   the minimum number of tokens of [`Devices::new`](crate::Devices::new), the GPU computes all experts; cached ones are not
//!   copied from the CPU.
//! - A cache decides where an expert is computed, never what is computed. If an allocation, a copy or a kernel fails, the CPU
//!   computes the experts, and the failure is counted and recorded.
//!
//! [`ExpertCache::enable_hot_cache`] builds a cache, and [`ExpertCache::exchange`] replaces experts between two requests.

mod build;
mod contents;
mod count;
mod dynamic;
mod error;
mod exchange;
mod expert_cache;
mod profile;
mod times;
mod worklist;

use std::collections::BTreeMap;

use moe_gguf::{ExpertId, LayerId};
use moe_placement::perf::{LaneIndex, PerfMode, SharedCounters};
use moe_placement::plan::{Lane, MAX_LANES};
use moe_placement::update;

use crate::activation::Activation;
use crate::buffers::Inventory;
use crate::cpu::matmul::Worklist;
use crate::device_id::DeviceId;

pub(crate) use contents::{Compact, LayerCache, Projections};
pub(crate) use count::PassCounts;
pub(crate) use dynamic::replace_lanes;
pub use dynamic::{DynamicParams, DynamicReport, DynamicSlots};
pub use error::Error;
pub use expert_cache::ExpertCache;
pub use profile::Profile;
use times::Sampling;
pub(crate) use times::{CallTimes, PendingTimes, Span};
pub(crate) use worklist::{LANES, LaneWorklist, N_LANES};

/// Why a layer whose experts have no gate is not cached.
const UNGATED: &str = "experts without a gate projection cannot be cached";

/// Experts of a lane.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LaneContents {
    /// Device that computes them. On the CPU they are copies in ordinary memory.
    pub device: DeviceId,
    /// Experts of each layer. Their order is that of the slots, unless the lane contains all experts of the layer.
    pub experts: BTreeMap<LayerId, Vec<ExpertId>>,
}

impl LaneContents {
    /// The experts of a lane of a plan, on `device`.
    pub fn new(device: DeviceId, lane: &Lane) -> LaneContents {
        let mut experts: BTreeMap<LayerId, Vec<ExpertId>> = BTreeMap::new();
        for selected in &lane.selected {
            let layer = experts.entry(selected.entry.layer).or_default();
            layer.push(selected.entry.expert);
        }
        LaneContents { device, experts }
    }
}

/// What a cache contains after it was built.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct HotCacheReport {
    /// Bytes of the copies of each lane, with the dummy of each layer.
    pub lane_bytes: Vec<u64>,
    /// Layers that are missing in a lane. Their experts are computed as without a cache.
    pub dropped: Vec<DroppedLayer>,
    /// The architecture of the model, if it has no [`Profile`]; the cache then uses [`Profile::GENERAL`].
    pub without_profile: Option<String>,
}

/// A layer that is missing in a lane.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DroppedLayer {
    /// Lane, from 0.
    pub lane: usize,
    /// Layer.
    pub layer: LayerId,
    /// Number of its experts that were requested.
    pub n_experts: usize,
    /// Why it is missing.
    pub reason: String,
}

/// Failures and shortcuts since a cache was built.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LaneEvents {
    /// Layer parts that could not be copied to a lane, when the cache was built.
    pub dropped_layers: u64,
    /// Calls of a hot lane that failed; the CPU computed its experts.
    pub failed_calls: u64,
    /// Experts that an exchange could not copy; the CPU computes them.
    pub failed_exchanges: u64,
    /// Message of the first failure.
    pub first_failure: Option<String>,
    /// Layer calls in which no hot lane had an expert.
    pub skipped_hot: u64,
    /// Layer calls in which the cold lane had no expert.
    pub skipped_cold: u64,
}

impl LaneEvents {
    /// Counts the lanes without entries of a layer call.
    pub(crate) fn skipped(&mut self, work: &LaneWorklist) {
        let is_empty = |lane| work.count(lane) == 0;
        self.skipped_hot += u64::from(LaneIndex::HOT.into_iter().all(is_empty));
        self.skipped_cold += u64::from(is_empty(LaneIndex::Cold));
    }

    /// Counts a failed call of a lane.
    pub(crate) fn failed(&mut self, message: Option<&String>) {
        self.failed_calls += 1;
        if self.first_failure.is_none() {
            self.first_failure = message.cloned();
        }
    }
}

/// A hot expert cache of a session.
pub struct HotCache {
    /// Device of each lane.
    devices: Vec<DeviceId>,
    /// By layer number; `None` for layers without cached experts.
    layers: Vec<Option<LayerCache>>,
    counters: SharedCounters,
    /// What is counted in the current pass.
    mode: PerfMode,
    /// Number of passes that the times of the current pass stand for; 0 if it is not timed.
    timed_passes: u64,
    sampling: Sampling,
    profile: Profile,
    /// Failures and shortcuts.
    events: LaneEvents,
    pub(crate) scratch: LaneScratch,
}

/// The parts of a cache that a call of a layer uses.
pub(crate) struct Call<'c> {
    pub layer: &'c LayerCache,
    /// Device of each lane.
    pub devices: &'c [DeviceId],
    pub scratch: &'c mut LaneScratch,
    pub events: &'c mut LaneEvents,
}

/// Memory of layer calls, reused between calls.
pub(crate) struct LaneScratch {
    /// The worklist.
    pub work: LaneWorklist,
    /// The entries of each lane that the CPU computes, grouped by expert.
    pub groups: [Worklist; N_LANES],
    /// Operands of a lane on a GPU.
    pub staged: Vec<u32>,
    /// Results of lanes that are added to that of the first one.
    pub sums: LaneSums,
    /// Lane of each entry in records.
    pub record_lanes: Vec<u8>,
    /// Lane in records of each entry whose expert is in a slot of the dynamic cache; empty without one.
    pub slot_lanes: Vec<u8>,
    /// Lane that computed each entry.
    pub computed_by: Vec<LaneIndex>,
    /// Times of the current call.
    pub times: CallTimes,
    /// The calls of the pass.
    pub counts: PassCounts,
}

/// Results of lanes that are added to that of the first one.
pub(crate) struct LaneSums {
    /// Results of lanes on GPUs after the first one `(token, n_embd)`, by lane.
    pub gpu: [Activation; MAX_LANES],
    /// Result of the CPU, if a GPU has computed a lane `(token, n_embd)`.
    pub cpu: Activation,
}

/// Ids of the buffers of lane sums: one for each hot lane, then that of the CPU. They follow the ids of the MoE layers.
const SUM_BUFFERS: u64 = 80;

impl LaneSums {
    fn new() -> LaneSums {
        let buffer = |lane: usize| Activation::new(SUM_BUFFERS + lane as u64);
        LaneSums {
            gpu: std::array::from_fn(buffer),
            cpu: buffer(MAX_LANES),
        }
    }
}

impl LaneScratch {
    fn new() -> LaneScratch {
        LaneScratch {
            work: LaneWorklist::default(),
            groups: Default::default(),
            staged: Vec::new(),
            sums: LaneSums::new(),
            record_lanes: Vec::new(),
            slot_lanes: Vec::new(),
            computed_by: Vec::new(),
            times: CallTimes::default(),
            counts: PassCounts::default(),
        }
    }
}

impl HotCache {
    /// Device of each lane.
    pub fn devices(&self) -> &[DeviceId] {
        &self.devices
    }

    /// Failures and shortcuts since the cache was built.
    pub fn events(&self) -> &LaneEvents {
        &self.events
    }

    /// How layer calls are computed.
    pub fn profile(&self) -> Profile {
        self.profile
    }

    /// Replaces the profile of the architecture.
    pub(crate) fn set_profile(&mut self, profile: Profile) {
        self.profile = profile;
    }

    /// The counters. Another thread may read them while the session runs; they contain complete passes.
    pub fn counters(&self) -> &SharedCounters {
        &self.counters
    }

    /// The cached experts of each layer, in all lanes.
    pub fn cached(&self) -> update::Cache {
        let lanes = (0..self.devices.len()).map(|lane| self.experts(lane));
        let experts = lanes.flat_map(|lane| {
            let layers = lane.into_iter();
            layers.flat_map(|(layer, experts)| experts.into_iter().map(move |e| (layer, e)))
        });
        experts.collect()
    }

    /// The experts of a lane in the order of their slots.
    pub fn experts(&self, lane: usize) -> BTreeMap<LayerId, Vec<ExpertId>> {
        let parts = (0..).zip(&self.layers).filter_map(|(layer, cache)| {
            let part = cache.as_ref()?.lanes.get(lane)?.as_ref()?;
            let experts: Vec<ExpertId> = part.experts.iter().flatten().copied().collect();
            (!experts.is_empty()).then_some((LayerId(layer), experts))
        });
        parts.collect()
    }

    /// Whether the cache contains an expert, in any lane.
    pub fn contains(&self, layer: LayerId, expert: ExpertId) -> bool {
        let places = self.layer(layer).map(|layer| &layer.places);
        let place = places.and_then(|places| places.get(expert.index()));
        place.is_some_and(|place| place.lane.is_hot())
    }

    /// Adds the buffers of layer calls to an inventory.
    pub(crate) fn buffers(&self, inventory: &mut Inventory) {
        let sums = &self.scratch.sums;
        for sum in &sums.gpu {
            inventory.activation("sum of a hot lane", sum);
        }
        inventory.activation("sum of the lanes on the CPU", &sums.cpu);
    }

    /// A layer with cached experts.
    pub(crate) fn layer(&self, layer: LayerId) -> Option<&LayerCache> {
        self.layers.get(layer.index())?.as_ref()
    }

    /// A call of a layer with cached experts.
    pub(crate) fn call(&mut self, layer: LayerId) -> Option<Call<'_>> {
        Some(Call {
            layer: self.layers.get(layer.index())?.as_ref()?,
            devices: &self.devices,
            scratch: &mut self.scratch,
            events: &mut self.events,
        })
    }
}

#[cfg(test)]
mod tests;
