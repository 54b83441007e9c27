//! Layer calls that are launched before the CPU knows their routing decisions.
//!
//! The GPU finds the slots of the selected experts itself (`cuda/device/finder.rs`). If all are in slots, its stream continues, and
//! nothing waits for the CPU. The CPU serves the calls in order, later: the policy looks the experts up, and if some are missing, while
//! the stream waits, they are copied to slots.
//!
//! A slot is overwritten only while the stream waits, so that no running work uses it: experts are evicted only in calls with missing
//! experts. That is true for single tokens if each layer can hold the experts of a token, once a single token has run in the layer; after a
//! prompt the policy can exceed its budget. With a predictor, copies must start as soon as the routing decisions are known; then the CPU
//! waits for them in each layer.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use moe_gguf::{ExpertId, LayerId};
use moe_placement::dynamic::Source;
use moe_placement::perf::LaneIndex;
use moe_trace::record::lane;

use super::super::HotCache;
use super::DynamicSlots;
use super::memory::CopyOrder;
use crate::cuda;
use crate::devices::Devices;

/// Number of calls that may be launched and not served. The driver accepts about 1000 launches ahead; a layer has about 20.
const MAX_CALLS: usize = 4;

/// The calls that are launched and not served.
#[derive(Default)]
pub(super) struct Ahead {
    /// Whether calls are launched ahead.
    is_enabled: bool,
    calls: VecDeque<Call>,
    /// Number of the last search.
    number: u32,
    /// By layer number: whether a single token has run in it since the last prompt.
    has_single: Vec<bool>,
    /// Lanes in records of the experts of the calls of this pass that were launched ahead.
    lanes: BTreeMap<LayerId, Vec<u8>>,
    /// Layers whose lookups in this pass are counted, although a pass that runs again looks the experts up again.
    counted: BTreeSet<LayerId>,
    /// Whether a call of this pass failed: its results are wrong.
    has_failed: bool,
}

/// A call that is launched and not served.
struct Call {
    layer: LayerId,
    number: u32,
    k: usize,
}

impl Ahead {
    /// Launches calls ahead, in a model with `n_layer` layers.
    pub fn enable(&mut self, n_layer: usize) {
        self.is_enabled = true;
        self.has_single = vec![false; n_layer];
    }

    /// Whether the lookups of a layer are counted already, because the pass runs again. Forgets it.
    pub fn take_counted(&mut self, layer: LayerId) -> bool {
        self.counted.remove(&layer)
    }

    /// Notes a call of a layer that was not launched ahead.
    pub fn ran(&mut self, layer: LayerId, is_single: bool) {
        if !is_single {
            self.has_single.fill(false);
        } else if let Some(has_single) = self.has_single.get_mut(layer.index()) {
            *has_single = true;
        }
    }
}

impl DynamicSlots<'_> {
    /// Whether the call of a layer for one token can be launched before its routing decisions are known.
    pub(crate) fn runs_ahead(&self, layer: LayerId) -> bool {
        let ahead = &self.ahead;
        ahead.is_enabled
            && !ahead.has_failed
            && ahead.has_single.get(layer.index()).is_some_and(|has| *has)
            && self.cache.guarantees_slots(layer)
    }

    /// Makes room for another call. Serves the first ones until few enough are left.
    pub(crate) fn make_room(&mut self, hot: &mut HotCache, devices: &mut Devices) {
        while self.ahead.calls.len() >= MAX_CALLS && self.serve_next(hot, devices, true) {}
        while self.serve_next(hot, devices, false) {}
    }

    /// Number of the next search.
    pub(crate) fn next_search(&mut self) -> u32 {
        self.ahead.number = self.ahead.number.wrapping_add(1);
        self.ahead.number
    }

    /// Slot that stands for experts of a layer without one.
    pub(crate) fn dummy(&self, layer: LayerId) -> usize {
        self.memory.n_slots(layer)
    }

    /// Notes that a call with `k` experts was launched, with search `number`.
    pub(crate) fn launched(&mut self, layer: LayerId, number: u32, k: usize) {
        self.ahead.calls.push_back(Call { layer, number, k });
    }

    /// Serves all calls. Waits until their routing decisions are known, but not for the stream.
    pub(crate) fn serve(&mut self, hot: &mut HotCache, devices: &mut Devices) {
        while self.serve_next(hot, devices, true) {}
    }

    /// Notes that a call that was launched ahead failed. The results of this pass are wrong; later passes are not launched ahead.
    pub(crate) fn call_failed(&mut self, hot: &mut HotCache, layer: LayerId, error: String) {
        hot.events.failed_calls += 1;
        hot.copy_failed(layer, error);
        (self.ahead.has_failed, self.ahead.is_enabled) = (true, false);
    }

    /// Whether a call of this pass failed, so that the pass must run again. Forgets it.
    pub(crate) fn take_failure(&mut self) -> bool {
        let has_failed = std::mem::take(&mut self.ahead.has_failed);
        if has_failed {
            self.ahead.lanes.clear();
        } else {
            self.ahead.counted.clear();
        }
        has_failed
    }

    /// Forgets that a call of this pass failed. The pass does not run again.
    pub(crate) fn ignore_failure(&mut self) {
        self.take_failure();
        self.ahead.counted.clear();
    }

    /// Whether a call of this pass failed.
    pub(crate) fn has_failed(&self) -> bool {
        self.ahead.has_failed
    }

    /// Lanes in records of the experts of calls that were launched ahead, by layer. Empties them.
    pub(crate) fn take_lanes(&mut self) -> BTreeMap<LayerId, Vec<u8>> {
        std::mem::take(&mut self.ahead.lanes)
    }

    /// Serves the first call. Returns `false` if no call is left, or if its routing decisions are unknown and `waits` is `false`.
    fn serve_next(&mut self, hot: &mut HotCache, devices: &mut Devices, waits: bool) -> bool {
        let Some(call) = self.ahead.calls.front() else {
            return false;
        };
        let (layer, number, k) = (call.layer, call.number, call.k);
        let found = loop {
            let device = self.memory.device();
            let Some(gpu) = devices.gpu(device) else {
                break Err(format!("{device} does not exist"));
            };
            match gpu.found(layer, number, k) {
                Ok(None) if waits => std::hint::spin_loop(),
                Ok(None) => return false,
                Ok(Some(found)) => break Ok(found),
                Err(error) => break Err(error.to_string()),
            }
        };
        self.ahead.calls.pop_front();
        let served = match found {
            // After a failure, the values on the GPU are wrong.
            Ok(_) if self.ahead.has_failed => Ok(()),
            Ok(found) => self.answer(hot, devices, layer, number, &found),
            Err(error) => Err(error),
        };
        if let Err(error) = served {
            self.call_failed(hot, layer, error);
        }
        if self.ahead.has_failed
            && let Some(gpu) = devices.gpu(self.memory.device())
        {
            gpu.release(layer, number);
        }
        true
    }

    /// Looks up the experts of a call, copies missing ones to slots, and lets the stream continue.
    fn answer(
        &mut self,
        hot: &mut HotCache,
        devices: &mut Devices,
        layer: LayerId,
        number: u32,
        found: &cuda::Found,
    ) -> Result<(), String> {
        let ids = &found.ids;
        let actions = self.cache.call(layer, true, ids, |_| true);
        self.ahead.counted.insert(layer);
        for &(layer, expert) in &actions.freed {
            self.memory.free(devices, layer, expert);
            hot.set_slot(layer, expert, None);
        }
        let waits = found.missing > 0;
        let mut sources = BTreeMap::new();
        let mut copied = Ok(());
        for used in &actions.used {
            let (slot, lane) = match used.source {
                Source::Slot(slot) => (slot, lane::CACHE_HIT),
                Source::Load(slot) => (slot, lane::CACHE_MISS),
                Source::Uncached => continue,
            };
            if lane == lane::CACHE_MISS && copied.is_ok() {
                copied = if waits {
                    self.memory
                        .copy(devices, layer, used.expert, slot, CopyOrder::Ahead)
                } else {
                    Err("the table of slots contains an evicted expert".to_owned())
                };
            }
            hot.set_slot(layer, used.expert, Some(slot));
            sources.insert(used.expert, (slot, lane));
        }
        let of_id = |id: &i32| sources.get(&ExpertId(id.cast_unsigned())).copied();
        let of_ids: Option<Vec<(u32, u8)>> = ids.iter().map(of_id).collect();
        let answered = match (copied, of_ids) {
            (Err(error), _) => Err(error),
            (Ok(()), None) => Err("a selected expert has no slot".to_owned()),
            (Ok(()), Some(of_ids)) => {
                let slots: Vec<u32> = of_ids.iter().map(|&(slot, _)| slot).collect();
                let lanes = of_ids.iter().map(|&(_, lane)| lane).collect();
                self.ahead.lanes.insert(layer, lanes);
                let gpu = devices.gpu_mut(self.memory.device()).filter(|_| waits);
                let answered = gpu.map_or(Ok(()), |gpu| gpu.answer(layer, number, &slots));
                answered.map_err(|error| error.to_string())
            }
        };
        if answered.is_err() {
            // Their copies may not have started.
            for (expert, _) in sources
                .iter()
                .filter(|(_, (_, lane))| *lane == lane::CACHE_MISS)
            {
                self.cache.copy_failed(layer, *expert);
                self.memory.free(devices, layer, *expert);
                hot.set_slot(layer, *expert, None);
            }
            return answered;
        }
        let computed_by = &mut hot.scratch.computed_by;
        computed_by.clear();
        computed_by.resize(ids.len(), LaneIndex::Hot0);
        hot.count(layer, ids, false);
        Ok(())
    }
}
