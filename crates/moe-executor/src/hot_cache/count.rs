//! Counts the calls of layers. A call only stores its entries; the counters are locked once, at the end of the pass.

use std::ops::Range;

use moe_gguf::LayerId;
use moe_placement::perf::{LaneIndex, LayerCall, PerfMode};

use super::HotCache;
use super::times::PendingTimes;
use crate::cuda::Download;
use crate::device_id::DeviceId;
use crate::devices::Devices;
use crate::error::Result;

/// What a pass has to count at its end. Memory is reused between passes.
#[derive(Default)]
pub(crate) struct PassCounts {
    calls: Vec<PassCall>,
    /// Selected experts of the calls.
    ids: Vec<i32>,
    /// The lane that computed each of `ids`.
    lanes: Vec<LaneIndex>,
    /// Times of the calls.
    pub times: Vec<PendingTimes>,
}

/// A layer call of the pass.
struct PassCall {
    layer: LayerId,
    entries: Entries,
    /// Whether a hot lane failed.
    has_failed: bool,
}

/// The selected experts of a call.
enum Entries {
    /// A range of [`PassCounts::ids`] and [`PassCounts::lanes`].
    Known(Range<usize>),
    /// A D2H copy that is complete at the end of the pass, and the lane that computed all of them.
    Copied(Download, LaneIndex),
}

impl PassCounts {
    fn clear(&mut self) {
        self.calls.clear();
        self.ids.clear();
        self.lanes.clear();
        self.times.clear();
    }

    fn push(&mut self, layer: LayerId, entries: Entries, has_failed: bool) {
        self.calls.push(PassCall {
            layer,
            entries,
            has_failed,
        });
    }
}

impl HotCache {
    /// What is counted in this pass.
    pub(crate) fn mode(&self) -> PerfMode {
        self.mode
    }

    /// Whether the times of this pass are measured.
    pub(crate) fn is_timed(&self) -> bool {
        self.timed_passes > 0
    }

    /// Starts a forward pass of `n_tokens`.
    pub(crate) fn begin_pass(&mut self, n_tokens: usize) {
        self.scratch.counts.clear();
        self.mode = self.counters.lock().mode();
        self.timed_passes = match self.mode {
            PerfMode::Full => self.sampling.begin(n_tokens),
            PerfMode::Off | PerfMode::Update => 0,
        };
    }

    /// Counts a call of a layer: its selected experts, the lane that computed each of them, and whether a hot lane failed.
    pub(crate) fn count(&mut self, layer: LayerId, ids: &[i32], has_failed: bool) {
        if self.mode == PerfMode::Off {
            return;
        }
        let counts = &mut self.scratch.counts;
        let start = counts.ids.len();
        counts.ids.extend_from_slice(ids);
        counts.lanes.extend_from_slice(&self.scratch.computed_by);
        let entries = Entries::Known(start..counts.ids.len());
        counts.push(layer, entries, has_failed);
    }

    /// Counts a call of a layer whose experts were all computed by `lane`, and whose ids are still on a GPU.
    pub(crate) fn count_copied(&mut self, layer: LayerId, ids: Download, lane: LaneIndex) {
        let entries = Entries::Copied(ids, lane);
        self.scratch.counts.push(layer, entries, false);
    }

    /// Counts a call of a layer whose experts were computed without lanes. The experts in lanes on `gpu` are hot; `None`: all are
    /// cold.
    pub(crate) fn count_on_gpu(&mut self, layer: LayerId, ids: &[i32], gpu: Option<DeviceId>) {
        let mut lanes = std::mem::take(&mut self.scratch.computed_by);
        let places = self.layer(layer).map(|layer| &layer.places);
        let is_on_gpu = |lane: LaneIndex| {
            let device = lane.hot_index().and_then(|lane| self.devices.get(lane));
            device.is_some_and(|device| Some(*device) == gpu)
        };
        lanes.clear();
        lanes.extend(ids.iter().map(|&id| {
            let place = places.and_then(|places| places.get(id as usize));
            let lane = place.map_or(LaneIndex::Cold, |place| place.lane);
            if is_on_gpu(lane) {
                lane
            } else {
                LaneIndex::Cold
            }
        }));
        self.scratch.computed_by = lanes;
        self.count(layer, ids, false);
    }

    /// Counts a completed pass and its calls, and adds their times.
    ///
    /// # Errors
    /// The pass has not ended.
    pub(crate) fn end_pass(&mut self, devices: &Devices) -> Result<()> {
        let counts = &self.scratch.counts;
        let all_in_lane = &mut self.scratch.computed_by;
        let mut counters = self.counters.lock();
        counters.start_pass();
        for call in &counts.calls {
            let (ids, lanes) = match &call.entries {
                Entries::Known(entries) => {
                    let entries = entries.clone();
                    (&counts.ids[entries.clone()], &counts.lanes[entries])
                }
                Entries::Copied(ids, lane) => {
                    let (ids, _) = devices.downloaded(ids)?;
                    all_in_lane.clear();
                    all_in_lane.resize(ids.len(), *lane);
                    (ids, all_in_lane.as_slice())
                }
            };
            let layer = call.layer;
            counters.add_call(&LayerCall {
                layer,
                ids,
                lanes,
                times: None,
            });
            if call.has_failed {
                counters.add_fallback(layer);
            }
        }
        for call in &counts.times {
            let times = call.times.resolve(call.ended, devices)?;
            counters.add_times(call.layer, &times, self.timed_passes);
        }
        Ok(())
    }
}
