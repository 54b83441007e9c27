//! Counters of the layers of a model.

use std::collections::BTreeMap;

use moe_ids::{ExpertId, LayerId};

use super::{LaneIndex, PerfMode};
use crate::plan::MAX_LANES;

/// Times of one call of a MoE layer, in ns. 0 for a part that did not run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LayerTimes {
    /// The complete MoE block, from the router to the merged output.
    pub total: u64,
    /// Router and selection of the experts.
    pub routing: u64,
    /// Assignment of the expert slots to lanes.
    pub worklist: u64,
    /// Each hot lane, from its start to its last result.
    pub hot_lanes: [u64; MAX_LANES],
    /// The cold lane, from its start to its last result.
    pub cold_lane: u64,
    /// From the end of the first hot lane that ran to the end of the last lane; 0 if no hot lane ran.
    pub join_wait: u64,
    /// From the start of the first lane to the end of the last one.
    pub region: u64,
    /// Addition of the results of the lanes.
    pub merge: u64,
}

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

/// Counters of one layer. Never overflow: no counter exceeds `slots`, `calls`, a sum of times or `fallbacks`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct LayerCounters {
    pub(super) calls: u64,
    /// Counted expert slots of all lanes.
    pub(super) slots: u64,
    /// Slots of each hot lane.
    pub(super) hot_slots: [u64; MAX_LANES],
    /// `[n_expert]`: selections of each expert that a hot lane computed.
    pub(super) hot: Vec<u64>,
    /// `[n_expert]`: selections of each expert that the cold lane computed.
    pub(super) cold: Vec<u64>,
    /// Sums of the times of the calls. A call whose times stand for several calls is added as often.
    pub(super) times: LayerTimes,
    /// Number of calls that `times` stands for.
    pub(super) timed_calls: u64,
    pub(super) overlap: u64,
    pub(super) hot_launches: u64,
    pub(super) hot_skips: u64,
    pub(super) cold_launches: u64,
    pub(super) fallbacks: u64,
}

impl LayerCounters {
    fn new(n_expert: u32) -> LayerCounters {
        let zeros = vec![0; n_expert as usize];
        LayerCounters {
            calls: 0,
            slots: 0,
            hot_slots: [0; MAX_LANES],
            hot: zeros.clone(),
            cold: zeros,
            times: LayerTimes::default(),
            timed_calls: 0,
            overlap: 0,
            hot_launches: 0,
            hot_skips: 0,
            cold_launches: 0,
            fallbacks: 0,
        }
    }

    /// Adds other counters. Returns `None`, and invalid sums, if one overflows.
    fn add(&mut self, other: &LayerCounters) -> Option<()> {
        self.calls = self.calls.checked_add(other.calls)?;
        self.slots = self.slots.checked_add(other.slots)?;
        self.fallbacks = self.fallbacks.checked_add(other.fallbacks)?;
        self.timed_calls = self.timed_calls.checked_add(other.timed_calls)?;
        self.times = sum(&self.times, &other.times, 1)?;
        // None of these exceeds `slots` or `calls`, or they saturate.
        let slots = [(&mut self.hot, &other.hot), (&mut self.cold, &other.cold)];
        for (counts, others) in slots {
            for (count, other) in counts.iter_mut().zip(others) {
                *count += other;
            }
        }
        for (slots, other) in self.hot_slots.iter_mut().zip(other.hot_slots) {
            *slots += other;
        }
        self.hot_skips += other.hot_skips;
        self.cold_launches += other.cold_launches;
        self.hot_launches = self.hot_launches.saturating_add(other.hot_launches);
        self.overlap = self.overlap.saturating_add(other.overlap);
        Some(())
    }

    /// The calls and slots that an earlier copy of these counters does not contain, without times.
    fn since(&self, earlier: &LayerCounters) -> LayerCounters {
        let difference = |counts: &[u64], earlier: &[u64]| {
            let pairs = counts.iter().zip(earlier);
            pairs.map(|(count, earlier)| count - earlier).collect()
        };
        let hot_slots = std::array::from_fn(|lane| self.hot_slots[lane] - earlier.hot_slots[lane]);
        LayerCounters {
            calls: self.calls - earlier.calls,
            slots: self.slots - earlier.slots,
            hot_slots,
            hot: difference(&self.hot, &earlier.hot),
            cold: difference(&self.cold, &earlier.cold),
            ..LayerCounters::new(0)
        }
    }

    /// Slots that all hot lanes computed.
    pub(super) fn hot_slots_total(&self) -> u64 {
        self.hot_slots.iter().sum()
    }

    /// Slots that the cold lane computed.
    pub(super) fn cold_slots_total(&self) -> u64 {
        self.slots - self.hot_slots_total()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.calls == 0 && self.slots == 0 && self.times.total == 0 && self.fallbacks == 0
    }
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

/// `a + n * b`; `None` if one of its fields overflows.
fn sum(a: &LayerTimes, b: &LayerTimes, n: u64) -> Option<LayerTimes> {
    let add = |a: u64, b: u64| a.checked_add(b.checked_mul(n)?);
    let mut hot_lanes = a.hot_lanes;
    for (sum, time) in hot_lanes.iter_mut().zip(b.hot_lanes) {
        *sum = add(*sum, time)?;
    }
    Some(LayerTimes {
        total: add(a.total, b.total)?,
        routing: add(a.routing, b.routing)?,
        worklist: add(a.worklist, b.worklist)?,
        hot_lanes,
        cold_lane: add(a.cold_lane, b.cold_lane)?,
        join_wait: add(a.join_wait, b.join_wait)?,
        region: add(a.region, b.region)?,
        merge: add(a.merge, b.merge)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(ids: &[i32]) -> LayerCall<'_> {
        LayerCall {
            layer: LayerId(1),
            ids,
            lanes: &[LaneIndex::Hot1],
            times: None,
        }
    }

    fn near_limit(limit: impl Fn(&mut LayerCounters)) -> Counters {
        let mut counters = Counters::new(PerfMode::Full, 4, 2);
        counters.start_pass();
        counters.add_call(&call(&[0, 1]));
        limit(counters.layers.get_mut(&LayerId(1)).unwrap());
        counters
    }

    /// After a restart, only the last call is counted.
    fn assert_restarted(mut counters: Counters) {
        assert_eq!((counters.updates, counters.overflow_resets), (0, 1));
        assert_eq!((counters.hot_slots(), counters.cold_slots()), (1, 1));
        let (hot, cold) = (ExpertId(2), ExpertId(3));
        assert_eq!(counters.selections(LayerId(1), hot), (1, 0));
        assert_eq!(counters.selections(LayerId(1), cold), (0, 1));
        counters.reset();
        assert_eq!(counters.overflow_resets(), 1, "a reset keeps the number");
        assert_eq!(counters.hit_rate(), None);
    }

    #[test]
    fn returns_the_selections_since_a_copy() {
        let call = |layer, ids| LayerCall {
            layer: LayerId(layer),
            ids,
            lanes: &[LaneIndex::Hot1],
            times: None,
        };
        let mut counters = Counters::new(PerfMode::Full, 4, 2);
        counters.start_pass();
        counters.add_call(&call(0, &[3, 1]));
        let earlier = counters.clone();
        counters.start_pass();
        counters.add_call(&call(0, &[3, 2]));
        counters.add_call(&call(5, &[0, 1]));
        let mut expected = Counters::new(PerfMode::Update, 4, 2);
        expected.start_pass();
        expected.add_call(&call(0, &[3, 2]));
        expected.add_call(&call(5, &[0, 1]));
        let since = counters.since(&earlier);
        let selections = |counters: &Counters| counters.to_learn_file().observations().unwrap();
        assert_eq!(selections(&since), selections(&expected));
        assert_eq!((since.updates, since.hot_slots()), (1, 2));
        assert!(selections(&counters.since(&counters)).is_empty());
        // A copy from before a restart has nothing in common with the counters.
        counters.reset();
        counters.start_pass();
        counters.add_call(&call(0, &[3, 2]));
        assert_eq!(counters.since(&earlier), counters);
    }

    #[test]
    fn counts_the_slots_of_each_lane_over_all_layers() {
        let mut counters = Counters::new(PerfMode::Update, 4, 2);
        assert_eq!(counters.lane_slots(), [0; 4]);
        for layer in [1, 2] {
            counters.add_call(&LayerCall {
                layer: LayerId(layer),
                ids: &[0, 1, 2, 3, 0, 9],
                lanes: &[LaneIndex::Hot1, LaneIndex::Hot0, LaneIndex::Hot1],
                times: None,
            });
        }
        // The last id is not an expert.
        assert_eq!(counters.lane_slots(), [2, 4, 0, 4]);
        assert_eq!((counters.hot_slots(), counters.cold_slots()), (6, 4));
    }

    #[test]
    fn restarts_before_calls_overflow() {
        let mut counters = near_limit(|layer| layer.calls = u64::MAX - 1);
        counters.add_call(&call(&[2]));
        assert_eq!(counters.overflow_resets, 0, "the limit is not reached");
        counters.add_call(&call(&[2, 3]));
        assert_restarted(counters);
    }

    #[test]
    fn restarts_before_slots_overflow() {
        let mut counters = near_limit(|layer| {
            layer.slots = u64::MAX - 1;
            layer.hot_slots = [0, u64::MAX - 1, 0];
            layer.hot[2] = u64::MAX - 1;
        });
        counters.add_call(&call(&[2]));
        assert_eq!(counters.hot_slots(), u64::MAX);
        counters.add_call(&call(&[2, 3]));
        assert_restarted(counters);
    }

    #[test]
    fn sum_restarts_before_it_overflows() {
        let full = near_limit(|layer| layer.calls = u64::MAX);
        let mut one = Counters::new(PerfMode::Full, 4, 2);
        one.add_call(&call(&[2, 3]));
        let mut sum = full.clone();
        sum.add(&one);
        assert_restarted(sum);
        let mut sum = one.clone();
        sum.add(&full);
        assert_eq!(sum.overflow_resets, 1);
        assert_eq!(sum.layers, full.layers);
    }

    #[test]
    fn restarts_before_passes_overflow() {
        let mut counters = near_limit(|_| ());
        counters.updates = u64::MAX;
        counters.start_pass();
        assert_eq!((counters.updates, counters.overflow_resets), (1, 1));
        assert_eq!(counters.hit_rate(), None);
    }

    #[test]
    fn restarts_before_times_or_fallbacks_overflow() {
        let mut counters = near_limit(|layer| {
            layer.times.total = u64::MAX;
            layer.fallbacks = u64::MAX;
        });
        counters.add_times(LayerId(1), &LayerTimes::default(), 1);
        assert_eq!(counters.overflow_resets, 0);
        let times = LayerTimes {
            total: 1,
            ..Default::default()
        };
        let mut other = counters.clone();
        counters.add_times(LayerId(1), &times, 1);
        assert_eq!(counters.overflow_resets, 1);
        assert_eq!(counters.layers[&LayerId(1)].times, times);
        other.add_fallback(LayerId(1));
        assert_eq!(other.overflow_resets, 1);
        assert_eq!(other.layers[&LayerId(1)].fallbacks, 1);
    }
}
