//! Builds a cache: copies experts to the devices of their lanes.

use moe_gguf::{ExpertId, LayerId};
use moe_placement::perf::{Counters, LaneIndex, PerfMode, SharedCounters};
use moe_placement::plan::MAX_LANES;

use super::contents::{Compact, LaneLayer, LayerCache, Projections};
use super::{
    DroppedLayer, Error, HotCache, HotCacheReport, LaneContents, LaneEvents, LaneScratch, Profile,
    Sampling, UNGATED,
};
use crate::device_id::DeviceId;
use crate::devices::Devices;
use crate::error::Result;
use crate::model::Model;

impl HotCache {
    /// Copies the experts of `lanes` to their devices. A layer that does not fit, or whose experts a GPU has already, is missing
    /// in its lane. Without lanes, all experts are cold, and only counted.
    ///
    /// # Errors
    /// [`Error`].
    pub(crate) fn build(
        model: &Model,
        devices: &mut Devices,
        lanes: &[LaneContents],
        mode: PerfMode,
    ) -> Result<(HotCache, HotCacheReport)> {
        check(model, devices, lanes)?;
        let hp = model.hparams();
        let used = hp.n_expert_used_by_layer.iter().copied().max();
        let profile = Profile::of(&hp.arch);
        let counters = Counters::new(mode, hp.n_expert as u32, used.unwrap_or(0) as u32);
        let mut cache = HotCache {
            devices: lanes.iter().map(|lane| lane.device).collect(),
            layers: Vec::new(),
            counters: SharedCounters::new(counters),
            mode,
            timed_passes: 0,
            sampling: Sampling::default(),
            profile: profile.unwrap_or(Profile::GENERAL),
            events: LaneEvents::default(),
            scratch: LaneScratch::new(),
        };
        cache.layers.resize_with(hp.n_layer, || None);
        let mut report = HotCacheReport {
            lane_bytes: vec![0; lanes.len()],
            dropped: Vec::new(),
            without_profile: profile.is_none().then(|| hp.arch.clone()),
        };
        for (index, lane) in lanes.iter().enumerate() {
            for (&layer, experts) in lane.experts.iter().filter(|(_, e)| !e.is_empty()) {
                match cache.add(model, devices, index, layer, experts.clone()) {
                    Ok(bytes) => report.lane_bytes[index] += bytes,
                    Err(reason) => {
                        cache.events.dropped_layers += 1;
                        let first = &mut cache.events.first_failure;
                        first.get_or_insert_with(|| reason.clone());
                        report.dropped.push(DroppedLayer {
                            lane: index,
                            layer,
                            n_experts: experts.len(),
                            reason,
                        });
                    }
                }
            }
        }
        Ok((cache, report))
    }

    /// Copies experts of a layer to a lane and returns the size of the copies, or the reason why they cannot be copied.
    fn add(
        &mut self,
        model: &Model,
        devices: &mut Devices,
        lane: usize,
        layer: LayerId,
        mut experts: Vec<ExpertId>,
    ) -> Result<u64, String> {
        let (Some(moe), Some(index)) = (model.decoder.moe(layer), LaneIndex::hot(lane)) else {
            return Ok(0);
        };
        let Some(projections) = moe.projections() else {
            return Err(UNGATED.to_owned());
        };
        let placed = projections.map(|linear| devices.placed(&linear.weights));
        if let Some(gpu) = placed.into_iter().find(|&device| device != DeviceId::Cpu) {
            return Err(format!("expert matrices of the layer are on {gpu} already"));
        }
        let n_expert = moe.n_expert();
        if experts.len() == n_expert {
            // All experts in the slots with their numbers.
            experts.sort_unstable();
        }
        let part = match devices.gpu_mut(self.devices[lane]) {
            None => LaneLayer::on_cpu(projections, &experts),
            Some(gpu) => {
                let inserted = gpu.insert_hot(lane, projections, &experts);
                LaneLayer {
                    bytes: inserted.map_err(|error| error.to_string())?,
                    on_cpu: None,
                    experts: experts.into_iter().map(Some).collect(),
                }
            }
        };
        let bytes = part.bytes;
        let cache = self.layers[layer.index()].get_or_insert_with(|| LayerCache::new(n_expert));
        cache.insert(index, part);
        Ok(bytes)
    }
}

impl LaneLayer {
    fn on_cpu(projections: Projections, experts: &[ExpertId]) -> LaneLayer {
        let copies = projections.map(|linear| Compact::new(linear, experts));
        LaneLayer {
            bytes: copies.iter().map(Compact::bytes).sum(),
            on_cpu: Some(copies),
            experts: experts.iter().copied().map(Some).collect(),
        }
    }
}

/// Checks the contents of the lanes.
fn check(model: &Model, devices: &Devices, lanes: &[LaneContents]) -> Result<(), Error> {
    if lanes.len() > MAX_LANES {
        return Err(Error::TooManyLanes { n: lanes.len() });
    }
    let mut seen = std::collections::BTreeSet::new();
    for (index, lane) in lanes.iter().enumerate() {
        let device = lane.device;
        if device != DeviceId::Cpu && devices.gpu(device).is_none() {
            return Err(Error::NoSuchDevice {
                lane: index,
                device,
                n_gpus: devices.gpus().len(),
            });
        }
        for (&layer, experts) in &lane.experts {
            let Some(moe) = model.decoder.moe(layer) else {
                return Err(Error::NoExperts { lane: index, layer });
            };
            let n_expert = moe.n_expert();
            for &expert in experts {
                if expert.index() >= n_expert {
                    return Err(Error::ExpertOutOfRange {
                        lane: index,
                        layer,
                        expert,
                        n_expert,
                    });
                }
                if !seen.insert((layer, expert)) {
                    return Err(Error::Repeated { layer, expert });
                }
            }
        }
    }
    Ok(())
}
