//! The dynamic cache: slots whose experts change while a request runs.
//!
//! ```text
//! ids ──► DynamicCache (policy, predictor, slots) ──► Actions: free, copy, prefetch ──► SlotMemory
//!                                                                └► places of the layer ──► LaneWorklist: slots, cold lane
//! ```
//!
//! - [`moe_placement::dynamic`] decides which expert is in which slot, with the rules of a simulation. [`SlotMemory`] contains the
//!   slots: GPU memory, or CPU memory without a GPU.
//! - Before a layer computes its experts, missing ones are copied to free slots. Then the layer runs like one with a hot lane; the
//!   slots are the first lane. The CPU computes experts without a slot.
//! - Prefetched experts are copied on a stream of their own. The compute stream waits for a copy when a layer uses the slot.

mod ahead;
mod memory;

use moe_gguf::{ExpertId, LayerId};
use moe_placement::dynamic::{Counts, DynamicCache, Settings, Source};
use moe_placement::perf::PerfMode;
use moe_placement::plan::ExpertSizes;
use moe_trace::record::lane;

use super::contents::{LaneLayer, LayerCache};
use super::{DroppedLayer, Error, HotCache};
use crate::device_id::DeviceId;
use crate::devices::Devices;
use crate::error::Result;
use crate::model::Model;

use ahead::Ahead;
use memory::{CopyOrder, SlotMemory};

/// A dynamic cache to build.
#[derive(Debug, Clone)]
pub struct DynamicParams {
    /// Policy, budget and predictor.
    pub settings: Settings,
    /// Sizes of the experts in bytes. Layers without sizes are not cached.
    pub sizes: ExpertSizes,
    /// Device of the slots. On the CPU they are ordinary memory.
    pub device: DeviceId,
}

/// What a dynamic cache has allocated.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DynamicReport {
    /// Slots for the budget, and for prefetched experts.
    pub n_slots: [usize; 2],
    /// Bytes of all slots, with a dummy of each size.
    pub bytes: u64,
    /// Layers that are not cached: their experts are computed as without a cache.
    pub dropped: Vec<DroppedLayer>,
}

/// The dynamic cache of a session. Its slots are the first lane of the session's [`HotCache`], which has the counters of lanes and the
/// failures.
pub struct DynamicSlots<'a> {
    cache: DynamicCache,
    memory: SlotMemory<'a>,
    /// `[n_expert]`: lane in records of the experts of the current call.
    lanes: Vec<u8>,
    /// Experts of the current call that could not be copied.
    failed: Vec<(LayerId, ExpertId)>,
    /// Calls that are launched before their routing decisions are known.
    ahead: Ahead,
}

impl<'a> DynamicSlots<'a> {
    /// Allocates the slots of a cache. Layers whose slots cannot be allocated are not cached.
    ///
    /// # Errors
    /// The device does not exist, or the settings do not fit to the model.
    pub(crate) fn build(
        model: &'a Model<'_>,
        devices: &mut Devices,
        params: &DynamicParams,
        mode: PerfMode,
    ) -> Result<(HotCache, DynamicSlots<'a>, DynamicReport)> {
        let device = params.device;
        if device != DeviceId::Cpu && devices.gpu(device).is_none() {
            return Err(Error::NoSuchDevice {
                lane: 0,
                device,
                n_gpus: devices.gpus().len(),
            }
            .into());
        }
        let (mut hot, _) = HotCache::build(model, devices, &[], mode)?;
        hot.devices = vec![device];
        let mut report = DynamicReport::default();
        let (mut memory, unsupported) = SlotMemory::new(model, devices, device);
        let mut dropped = |layer: LayerId, reason: &str| {
            report.dropped.push(DroppedLayer {
                lane: 0,
                layer,
                n_experts: model.hparams().n_expert,
                reason: reason.to_owned(),
            });
        };
        unsupported
            .iter()
            .for_each(|(layer, reason)| dropped(*layer, reason));
        let sizes = params.sizes.iter();
        let sizes = sizes.filter(|&(layer, _, _)| memory.class(layer).is_some());
        let used = model.hparams().n_expert_used_by_layer.iter().copied().max();
        let mut cache = DynamicCache::new(
            &sizes.collect(),
            |layer| memory.class(layer).unwrap_or(0),
            used.unwrap_or(0),
            &params.settings,
        )?;
        for (class, n) in cache.n_slots().into_iter().enumerate() {
            match memory.allocate(devices, class, n.iter().sum()) {
                Ok(bytes) => {
                    report.bytes += bytes;
                    report
                        .n_slots
                        .iter_mut()
                        .zip(n)
                        .for_each(|(sum, n)| *sum += n);
                }
                Err(error) => {
                    for layer in memory.layers_of(class) {
                        cache.remove_slots(layer);
                        dropped(layer, &error);
                    }
                }
            }
        }
        hot.events.dropped_layers = report.dropped.len() as u64;
        hot.events.first_failure = report.dropped.first().map(|layer| layer.reason.clone());
        for layer in (0..).map(LayerId).take(hot.layers.len()) {
            if let (Some(moe), Some(_)) = (model.decoder.moe(layer), memory.class(layer)) {
                let mut contents = LayerCache::new(moe.n_expert());
                let n_slots = memory.n_slots(layer);
                contents.lanes[0] = (n_slots > 0).then(|| LaneLayer {
                    experts: vec![None; n_slots],
                    on_cpu: None,
                    bytes: 0,
                });
                hot.layers[layer.index()] = Some(contents);
            }
        }
        let mut ahead = Ahead::default();
        let n_layer = model.hparams().n_layer;
        let mut devices_of_layers = (0..).map(LayerId).take(n_layer);
        let is_alone = devices_of_layers.all(|layer| devices.layer(layer) == device);
        // A pass whose copies failed runs again, but recurrent states cannot be rewound.
        let has_states = model.hparams().has_states();
        if let Some(gpu) = devices.gpu_mut(device)
            && is_alone
            && !has_states
            && params.settings.predictor.is_none()
            && gpu
                .enable_finder(n_layer, model.hparams().n_expert, used.unwrap_or(0))
                .is_ok()
        {
            ahead.enable(n_layer);
        }
        let slots = DynamicSlots {
            cache,
            memory,
            lanes: Vec::new(),
            failed: Vec::new(),
            ahead,
        };
        Ok((hot, slots, report))
    }

    /// Counts since the cache was built.
    pub fn counts(&self) -> Counts {
        self.cache.counts()
    }

    /// Puts the experts that a layer has selected (`ids`, all tokens of the pass, and their number) into slots, as far as they fit, and starts the
    /// copies of experts that are predicted for a later layer. Until [`DynamicSlots::release`], `hot` computes the layer with the
    /// slots.
    pub(crate) fn prepare(
        &mut self,
        hot: &mut HotCache,
        devices: &mut Devices,
        il: LayerId,
        (ids, n_tokens): (&[i32], usize),
        is_generated: bool,
    ) {
        hot.scratch.slot_lanes.clear();
        let Some(layer) = hot.layer(il) else {
            return;
        };
        self.ahead.ran(il, is_generated && n_tokens == 1);
        self.lanes.clear();
        self.lanes.resize(layer.places.len(), lane::CPU);
        let memory = &mut self.memory;
        let actions = if self.ahead.take_counted(il) {
            self.cache.repeat_call(il, is_generated, ids)
        } else {
            let is_complete = |slot| memory.is_complete(devices, il, slot);
            self.cache.call(il, is_generated, ids, is_complete)
        };
        for &(layer, expert) in &actions.freed {
            memory.free(devices, layer, expert);
            hot.set_slot(layer, expert, None);
        }
        for used in &actions.used {
            let expert = used.expert;
            let (slot, copied, lane) = match used.source {
                Source::Slot(slot) => (slot, memory.wait_for(devices, il, slot), lane::CACHE_HIT),
                Source::Load(slot) => {
                    let copied = memory.copy(devices, il, expert, slot, CopyOrder::InStream);
                    (slot, copied, lane::CACHE_MISS)
                }
                Source::Uncached => continue,
            };
            match copied {
                Ok(()) => {
                    hot.set_slot(il, expert, Some(slot));
                    self.lanes[expert.index()] = lane;
                }
                Err(error) => {
                    hot.copy_failed(il, error);
                    self.failed.push((il, expert));
                }
            }
        }
        for &(layer, expert, slot) in &actions.prefetched {
            match memory.copy(devices, layer, expert, slot, CopyOrder::Prefetch) {
                Ok(()) => hot.set_slot(layer, expert, Some(slot)),
                Err(error) => {
                    hot.copy_failed(layer, error);
                    self.failed.push((layer, expert));
                }
            }
        }
        for (layer, expert) in self.failed.drain(..) {
            self.cache.copy_failed(layer, expert);
            self.memory.free(devices, layer, expert);
            hot.set_slot(layer, expert, None);
        }
        let lanes = ids.iter().map(|&id| self.lanes[id as usize]);
        hot.scratch.slot_lanes.extend(lanes);
        self.memory.lend(hot, il);
    }

    /// Ends the call of a layer after [`DynamicSlots::prepare`].
    pub(crate) fn release(&mut self, hot: &mut HotCache, il: LayerId) {
        self.memory.take_back(hot, il);
        hot.scratch.slot_lanes.clear();
    }
}

impl HotCache {
    /// Notes the slot of an expert; `None`: it is in none.
    fn set_slot(&mut self, layer: LayerId, expert: ExpertId, slot: Option<u32>) {
        let layer = self.layers.get_mut(layer.index());
        if let Some(layer) = layer.and_then(Option::as_mut) {
            layer.places[expert.index()] = match slot {
                Some(index) => super::worklist::Place {
                    lane: moe_placement::perf::LaneIndex::Hot0,
                    index,
                },
                None => super::worklist::Place::cold(expert.index()),
            };
        }
    }

    /// Notes that an expert of a layer could not be copied to its slot.
    fn copy_failed(&mut self, layer: LayerId, error: String) {
        self.events.first_failure.get_or_insert(error);
        self.counters.lock().add_fallback(layer);
    }
}

/// Replaces the lane of experts in slots by the lane of the dynamic cache. Without a dynamic cache, `slot_lanes` is empty.
pub(crate) fn replace_lanes(record_lanes: &mut [u8], slot_lanes: &[u8]) {
    let in_slots = record_lanes.iter_mut().zip(slot_lanes);
    let in_slots = in_slots.filter(|(lane, _)| **lane == lane::HOT_CACHE);
    in_slots.for_each(|(lane, slot_lane)| *lane = *slot_lane);
}
