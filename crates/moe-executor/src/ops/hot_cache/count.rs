//! Counts and times of the calls of a layer.

use std::time::Instant;

use moe_placement::perf::{LaneIndex, PerfMode};
use moe_trace::LayerId;
use moe_trace::record::lane;

use crate::cuda::Download;
use crate::device_id::DeviceId;
use crate::devices::TimePoint;
use crate::hot_cache::{CallTimes, PendingTimes};
use crate::ops::{At, Ops};
use crate::recorder::{LaneCounts, Routing};
use crate::weights::Matrix;

impl Ops<'_> {
    /// Notes the start of a call of a MoE layer on `device`, if times are measured.
    pub(crate) fn begin_call(&mut self, device: DeviceId) {
        let began = self.time_point(device);
        if let Some(cache) = &mut self.hot {
            cache.scratch.times = CallTimes {
                began,
                ..CallTimes::default()
            };
        }
    }

    /// Notes the end of the router of a MoE layer on `device`, if times are measured.
    pub(crate) fn end_routing(&mut self, device: DeviceId) {
        let routed = self.time_point(device);
        if let Some(cache) = &mut self.hot {
            cache.scratch.times.routed = routed;
        }
    }

    /// Notes the end of a call of a MoE layer, if times are measured.
    pub(crate) fn end_call(&mut self, At { il: layer, device }: At) {
        let ended = self.time_point(device);
        if let (Some(cache), Some(ended)) = (&mut self.hot, ended) {
            let complete = cache.layer(layer).and_then(|layer| layer.complete);
            let mut times = cache.scratch.times;
            times.only(complete.unwrap_or(LaneIndex::Cold), ended);
            cache.scratch.counts.times.push(PendingTimes {
                layer,
                times,
                ended,
            });
        }
    }

    /// The current time on a device; `None` if times are not measured.
    pub(super) fn time_point(&mut self, device: DeviceId) -> Option<TimePoint> {
        if !self.hot.as_ref()?.is_timed() {
            return None;
        }
        match self.devices.gpu_mut(device) {
            Some(gpu) => Some(TimePoint::Gpu(device, gpu.record_event().ok()?)),
            None => Some(TimePoint::Cpu(Instant::now())),
        }
    }

    /// Counts a call of a layer whose experts, with the matrices `down`, were computed without lanes. If only a GPU has the ids, they
    /// are counted at the end of the pass: nothing waits for them.
    pub(crate) fn count_without_lanes(
        &mut self,
        il: LayerId,
        down: &Matrix,
        routing: &mut Routing,
        lanes: &LaneCounts,
    ) {
        let Some(mut cache) = self.hot.take() else {
            return;
        };
        if cache.mode() != PerfMode::Off {
            let has_hot = lanes[usize::from(lane::HOT_CACHE)] > 0 || self.dynamic.is_some();
            let layer = cache.layer(il).filter(|_| has_hot);
            let all = layer.map_or(Some(LaneIndex::Cold), |layer| layer.complete);
            match all.and_then(|lane| Some((lane, self.download_ids(routing)?))) {
                Some((lane, ids)) => cache.count_copied(il, ids, lane),
                None => {
                    self.fetch(&mut routing.ids);
                    let gpu = self.devices.nearest_gpu(down).filter(|_| has_hot);
                    cache.count_on_gpu(il, routing.ids.host(), gpu);
                }
            }
        }
        self.hot = Some(cache);
    }

    /// The D2H copy of the ids of a layer, which is complete at the end of the pass, if only a GPU has them.
    pub(super) fn download_ids(&mut self, routing: &mut Routing) -> Option<Download> {
        let gpu = self.devices.gpu_mut(routing.ids.home())?;
        match routing.copy {
            Some(copy) => Some(copy),
            None => gpu.begin_id_download(routing).ok(),
        }
    }
}
