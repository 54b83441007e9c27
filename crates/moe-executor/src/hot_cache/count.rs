//! Counts the calls of layers.

use moe_gguf::LayerId;
use moe_placement::perf::{LaneIndex, LayerCall, PerfMode};

use super::HotCache;
use crate::cuda::Download;
use crate::devices::Devices;
use crate::error::Result;
use crate::placement::DeviceId;

/// A layer call whose ids were still on a GPU. They are counted at the end of the pass.
pub(crate) struct PendingCall {
    pub layer: LayerId,
    /// The D2H copy of the ids.
    pub ids: Download,
    /// The lane that computed all of them.
    pub lane: LaneIndex,
}

impl HotCache {
    /// What is counted in this pass.
    pub(crate) fn mode(&self) -> PerfMode {
        self.mode
    }

    /// Starts a forward pass.
    pub(crate) fn begin_pass(&mut self) {
        self.scratch.pending.clear();
        self.scratch.pending_times.clear();
        let mut counters = self.counters.lock();
        self.mode = counters.mode();
        counters.start_pass();
    }

    /// Counts a call of a layer: its selected experts, and the lane that computed each of them.
    pub(crate) fn count(&self, layer: LayerId, ids: &[i32], lanes: &[LaneIndex]) {
        if self.mode != PerfMode::Off {
            self.counters.lock().add_call(&LayerCall {
                layer,
                ids,
                lanes,
                times: None,
            });
        }
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
        self.count(layer, ids, &lanes);
        self.scratch.computed_by = lanes;
    }

    /// Counts a call in which a hot lane failed.
    pub(crate) fn count_fallback(&mut self, layer: LayerId) {
        self.counters.lock().add_fallback(layer);
    }

    /// Counts the calls of a completed pass whose ids were on a GPU, and adds the times of all calls.
    ///
    /// # Errors
    /// The pass has not ended.
    pub(crate) fn end_pass(&mut self, devices: &Devices) -> Result<()> {
        let mut lanes = std::mem::take(&mut self.scratch.computed_by);
        for call in &self.scratch.pending {
            let (ids, _) = devices.downloaded(&call.ids)?;
            lanes.clear();
            lanes.resize(ids.len(), call.lane);
            self.count(call.layer, ids, &lanes);
        }
        self.scratch.computed_by = lanes;
        self.scratch.pending.clear();
        for call in &self.scratch.pending_times {
            let times = call.times.resolve(call.ended, devices)?;
            self.counters.lock().add_times(call.layer, &times);
        }
        self.scratch.pending_times.clear();
        Ok(())
    }
}
