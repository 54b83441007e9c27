//! Counters of a model.

use std::collections::BTreeMap;

use moe_ids::{ExpertId, LayerId};

use super::layer::{LayerCounters, LayerTimes, sum};
use super::{LaneIndex, PerfMode};
use crate::plan::MAX_LANES;

/// One call of a MoE layer: the routing of a batch of tokens.
#[derive(Debug, Clone, Copy)]
pub struct LayerCall<'a> {
    /// Block number in the model.
    pub layer: LayerId,
    /// Selected experts of all tokens. An id that is not an expert of the layer is ignored.
    pub ids: &'a [i32],
    /// The lane that computes each entry of `ids`. Missing entries are cold.
    pub lanes: &'a [LaneIndex],
    /// Times of the call; ignored unless the mode is [`PerfMode::Full`].
    pub times: Option<&'a LayerTimes>,
}

/// Counters of selections, lanes and times. The rules are those of the fork: each call of a layer adds 1 to its calls and 1
/// for each selected expert. The prompt and generated tokens are both counted.
///
/// If a counter would overflow, all counters restart at 0, [`overflow_resets`](Counters::overflow_resets) grows by 1, and
/// the call is counted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Counters {
    pub(super) mode: PerfMode,
    pub(super) n_expert: u32,
    pub(super) n_expert_used: u32,
    pub(super) updates: u64,
    pub(super) overflow_resets: u64,
    /// Number of times that all counters restarted at 0, for whatever reason.
    restarts: u64,
    pub(super) layers: BTreeMap<LayerId, LayerCounters>,
}

impl Counters {
    /// Counters at 0.
    ///
    /// - `n_expert`: experts per layer; the maximum if layers differ.
    /// - `n_expert_used`: selected experts per token.
    pub fn new(mode: PerfMode, n_expert: u32, n_expert_used: u32) -> Counters {
        Counters {
            mode,
            n_expert,
            n_expert_used,
            updates: 0,
            overflow_resets: 0,
            restarts: 0,
            layers: BTreeMap::new(),
        }
    }

    /// What is counted.
    pub fn mode(&self) -> PerfMode {
        self.mode
    }

    /// Changes what is counted, and restarts all counters at 0.
    pub fn set_mode(&mut self, mode: PerfMode) {
        self.mode = mode;
        self.reset();
    }

    /// Counts a forward pass. A batch of any number of tokens is one pass.
    pub fn start_pass(&mut self) {
        if self.mode == PerfMode::Off {
            return;
        }
        if self.updates == u64::MAX {
            self.restart_after_overflow();
        }
        self.updates += 1;
    }

    /// Counts a call of a layer.
    pub fn add_call(&mut self, call: &LayerCall) {
        if self.mode == PerfMode::Off {
            return;
        }
        if self.would_overflow(call) {
            self.restart_after_overflow();
        }
        let is_full = self.mode == PerfMode::Full;
        let layer = self.layer(call.layer);
        layer.calls += 1;
        let lanes = call.lanes.iter().copied();
        let lanes = lanes.chain(std::iter::repeat(LaneIndex::Cold));
        let mut slots = [0; MAX_LANES];
        let mut cold_slots = 0;
        for (&id, lane) in call.ids.iter().zip(lanes) {
            let counts = if lane.is_hot() {
                &mut layer.hot
            } else {
                &mut layer.cold
            };
            let Some(count) = usize::try_from(id).ok().and_then(|id| counts.get_mut(id)) else {
                continue;
            };
            *count += 1;
            *lane
                .hot_index()
                .map_or(&mut cold_slots, |lane| &mut slots[lane]) += 1;
        }
        layer.slots += cold_slots + slots.iter().sum::<u64>();
        for (total, slots) in layer.hot_slots.iter_mut().zip(slots) {
            *total += slots;
        }
        if is_full {
            let launched = slots.iter().filter(|&&slots| slots > 0).count() as u64;
            layer.hot_launches = layer.hot_launches.saturating_add(launched);
            layer.hot_skips += u64::from(launched == 0);
            layer.cold_launches += u64::from(cold_slots > 0);
        }
        if let Some(times) = call.times {
            self.add_times(call.layer, times, 1);
        }
    }

    /// Adds the times of a call whose [`LayerCall::times`] were not known yet. They stand for `n_calls` calls: this one and others
    /// whose times are not measured. Ignored unless the mode is [`PerfMode::Full`].
    pub fn add_times(&mut self, layer: LayerId, times: &LayerTimes, n_calls: u64) {
        if self.mode != PerfMode::Full {
            return;
        }
        let has_room = |layer: &LayerCounters| {
            sum(&layer.times, times, n_calls).is_some()
                && layer.timed_calls.checked_add(n_calls).is_some()
        };
        if !self.layers.get(&layer).is_none_or(has_room) {
            self.restart_after_overflow();
        }
        let layer = self.layer(layer);
        // A call that overflows alone is not added.
        let Some(sum) = sum(&layer.times, times, n_calls) else {
            return;
        };
        layer.times = sum;
        layer.timed_calls += n_calls;
        let lanes = times.hot_lanes.iter().chain([&times.cold_lane]);
        let lanes = lanes.fold(0, |sum: u64, &lane| sum.saturating_add(lane));
        let overlap = lanes.saturating_sub(times.region).saturating_mul(n_calls);
        layer.overlap = layer.overlap.saturating_add(overlap);
    }

    /// Counts a call in which a hot lane failed and the cold lane computed its slots. Ignored unless the mode is
    /// [`PerfMode::Full`].
    pub fn add_fallback(&mut self, layer: LayerId) {
        if self.mode != PerfMode::Full {
            return;
        }
        let has_room = |layer: &LayerCounters| layer.fallbacks < u64::MAX;
        if !self.layers.get(&layer).is_none_or(has_room) {
            self.restart_after_overflow();
        }
        self.layer(layer).fallbacks += 1;
    }

    /// Adds other counters, such as those of a later request. Their mode and numbers of experts are those of these counters.
    pub fn add(&mut self, other: &Counters) {
        let overflow_resets = self.overflow_resets;
        let Some(sum) = self.plus(other) else {
            *self = other.clone();
            self.overflow_resets = overflow_resets.saturating_add(other.overflow_resets);
            self.overflow_resets = self.overflow_resets.saturating_add(1);
            return;
        };
        *self = sum;
    }

    /// The sum; `None` if a counter overflows.
    fn plus(&self, other: &Counters) -> Option<Counters> {
        let mut sum = self.clone();
        sum.updates = sum.updates.checked_add(other.updates)?;
        sum.overflow_resets = sum.overflow_resets.saturating_add(other.overflow_resets);
        for (&id, other) in &other.layers {
            sum.layer(id).add(other)?;
        }
        Some(sum)
    }

    /// The passes, calls and slots that `earlier`, a copy of these counters, does not contain; without times. If the counters have
    /// restarted since the copy was made, all of them.
    pub fn since(&self, earlier: &Counters) -> Counters {
        if self.restarts != earlier.restarts {
            return self.clone();
        }
        let zero = LayerCounters::new(self.n_expert);
        let layers = self.layers.iter().map(|(id, layer)| {
            let earlier = earlier.layers.get(id).unwrap_or(&zero);
            (*id, layer.since(earlier))
        });
        Counters {
            updates: self.updates - earlier.updates,
            layers: layers.collect(),
            ..*self
        }
    }

    /// Restarts all counters at 0. [`overflow_resets`](Counters::overflow_resets) keeps its value.
    pub fn reset(&mut self) {
        self.layers.clear();
        self.updates = 0;
        self.restarts = self.restarts.wrapping_add(1);
    }

    /// Number of counted forward passes.
    pub fn updates(&self) -> u64 {
        self.updates
    }

    /// Number of times that a counter would have overflowed and all counters restarted.
    pub fn overflow_resets(&self) -> u64 {
        self.overflow_resets
    }

    /// Slots that the hot lanes computed, over all layers. Saturates.
    pub fn hot_slots(&self) -> u64 {
        let slots = self.layers.values().map(LayerCounters::hot_slots_total);
        slots.fold(0, u64::saturating_add)
    }

    /// Slots that the cold lane computed, over all layers. Saturates.
    pub fn cold_slots(&self) -> u64 {
        let slots = self.layers.values().map(LayerCounters::cold_slots_total);
        slots.fold(0, u64::saturating_add)
    }

    /// Slots that each lane computed, over all layers, in the order of [`LaneIndex::ALL`]. Saturates.
    pub fn lane_slots(&self) -> [u64; LaneIndex::ALL.len()] {
        let mut sums = [0u64; LaneIndex::ALL.len()];
        for layer in self.layers.values() {
            let slots = layer
                .hot_slots
                .into_iter()
                .chain([layer.cold_slots_total()]);
            for (sum, slots) in sums.iter_mut().zip(slots) {
                *sum = sum.saturating_add(slots);
            }
        }
        sums
    }

    /// Fraction of the slots that hot lanes computed, 0.0 to 1.0; `None` without slots.
    pub fn hit_rate(&self) -> Option<f64> {
        let hot = self.hot_slots();
        let slots = hot.saturating_add(self.cold_slots());
        (slots > 0).then(|| hot as f64 / slots as f64)
    }

    /// Selections of an expert of a layer: `(hot, cold)`.
    pub fn selections(&self, layer: LayerId, expert: ExpertId) -> (u64, u64) {
        let Some(layer) = self.layers.get(&layer) else {
            return (0, 0);
        };
        let count = |counts: &[u64]| counts.get(expert.index()).copied().unwrap_or(0);
        (count(&layer.hot), count(&layer.cold))
    }

    fn layer(&mut self, layer: LayerId) -> &mut LayerCounters {
        let n_expert = self.n_expert;
        let new = || LayerCounters::new(n_expert);
        self.layers.entry(layer).or_insert_with(new)
    }

    fn would_overflow(&self, call: &LayerCall) -> bool {
        self.layers.get(&call.layer).is_some_and(|layer| {
            let slots = layer.slots.checked_add(call.ids.len() as u64);
            slots.is_none() || layer.calls == u64::MAX
        })
    }

    fn restart_after_overflow(&mut self) {
        self.reset();
        self.overflow_resets = self.overflow_resets.saturating_add(1);
    }
}

#[cfg(test)]
mod tests;
