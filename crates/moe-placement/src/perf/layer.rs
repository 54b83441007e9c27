//! Times and counters of a layer.

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

/// `a + n * b`; `None` if one of its fields overflows.
pub(super) fn sum(a: &LayerTimes, b: &LayerTimes, n: u64) -> Option<LayerTimes> {
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
    pub(super) fn new(n_expert: u32) -> LayerCounters {
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
    pub(super) fn add(&mut self, other: &LayerCounters) -> Option<()> {
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
    pub(super) fn since(&self, earlier: &LayerCounters) -> LayerCounters {
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
