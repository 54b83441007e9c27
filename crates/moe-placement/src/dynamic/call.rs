//! A call of a layer.

use moe_ids::{ExpertId, LayerId};

use super::{Counts, DynamicCache, Slot};
use crate::cache::{Access, Key};

/// What the caller does in a call of a layer, in the order of the fields.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Actions {
    /// Experts that leave their slots.
    pub freed: Vec<(LayerId, ExpertId)>,
    /// The distinct experts of the call, in the order of their look-ups.
    pub used: Vec<Use>,
    /// Experts to copy to slots before their layer selects them, after the copies of `used`.
    pub prefetched: Vec<(LayerId, ExpertId, Slot)>,
}

/// An expert of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Use {
    /// The expert.
    pub expert: ExpertId,
    /// Where its weights are.
    pub source: Source,
}

/// Where the weights of an expert are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// In a slot, before the call.
    Slot(Slot),
    /// In this slot, after the caller has copied them.
    Load(Slot),
    /// In no slot.
    Uncached,
}

impl DynamicCache {
    /// Looks up the experts `ids` (all tokens of a pass, in order) that `layer` has selected. Ids that are not experts of the layer
    /// are ignored. `is_complete` returns whether the copy of a prefetched expert to its slot has ended; it is called for
    /// generated tokens (`is_generated`).
    pub fn call(
        &mut self,
        layer: LayerId,
        is_generated: bool,
        ids: &[i32],
        is_complete: impl FnMut(Slot) -> bool,
    ) -> &Actions {
        self.actions.freed.clear();
        self.actions.used.clear();
        self.actions.prefetched.clear();
        self.selected.clear();
        let expert = |id: &i32| ExpertId(u32::try_from(*id).unwrap_or(u32::MAX));
        let keys = ids
            .iter()
            .filter_map(|id| self.experts.key(layer, expert(id)));
        self.selected.extend(keys);
        if let Some(&first) = self.selected.first() {
            self.look_up(is_generated, is_complete);
            let index = self.experts.layer_index(first);
            if is_generated {
                self.end_pass(index);
            }
            self.find_slots();
            self.predict(index, is_generated);
        }
        &self.actions
    }

    /// Repeats a call of the current pass, because its results are lost. The lookups are counted only once, with the results of the
    /// first call. Evictions are counted.
    pub fn repeat_call(&mut self, layer: LayerId, is_generated: bool, ids: &[i32]) -> &Actions {
        let counts = self.counts;
        self.call(layer, is_generated, ids, |_| true);
        self.counts = Counts {
            evictions: self.counts.evictions,
            ..counts
        };
        &self.actions
    }

    /// Looks the selected experts up in the policy, and frees the slots of evicted experts. Without slots, every lookup is a miss, and
    /// no expert is evicted.
    fn look_up(&mut self, is_generated: bool, mut is_complete: impl FnMut(Slot) -> bool) {
        self.call += 1;
        self.distinct.clear();
        let phase = usize::from(is_generated);
        let has_slots = !self.slots.is_empty();
        let counts = &mut self.counts;
        for &key in &self.selected {
            if std::mem::replace(&mut self.last_call[key as usize], self.call) == self.call {
                if has_slots {
                    self.policy.look_up_again(key);
                }
                continue;
            }
            self.distinct.push(key);
            counts.look_ups[phase] += 1;
            if has_slots && self.policy.look_up(key) == Access::Hit {
                counts.hits[phase] += 1;
                continue;
            }
            let bytes = self.experts.bytes(key);
            counts.missed_bytes[phase] = counts.missed_bytes[phase].saturating_add(bytes);
            if !is_generated {
                continue;
            }
            let layer = self.experts.layer_index(key);
            let prefetch = self.prefetch.as_mut();
            let loads = &mut counts.prefetch;
            match prefetch.and_then(|prefetch| prefetch.prefetches.take(layer, key)) {
                Some(()) if self.slots.get(key).is_some_and(&mut is_complete) => loads.timely += 1,
                Some(()) => loads.late += 1,
                None => {
                    loads.missed += 1;
                    loads.moved_bytes = loads.moved_bytes.saturating_add(bytes);
                }
            }
        }
        self.policy.end_batch(&mut self.changes);
        self.counts.evictions += self.changes.evicted.len() as u64;
        for at in 0..self.changes.evicted.len() {
            self.free_unused(self.changes.evicted[at]);
        }
        self.changes.clear();
    }

    /// Frees the slots of prefetched experts that the layer has not selected.
    fn end_pass(&mut self, layer_index: usize) {
        let Some(prefetch) = &mut self.prefetch else {
            return;
        };
        let dropped = prefetch.prefetches.end_pass(layer_index, &self.distinct);
        let dropped: Vec<Key> = dropped.map(|(key, ())| key).collect();
        for key in dropped {
            self.free_unused(key);
        }
    }

    /// Frees the slot of an expert that is neither in the cache nor prefetched. A prompt can look up a prefetched expert; then it is
    /// both.
    fn free_unused(&mut self, key: Key) {
        let layer_index = self.experts.layer_index(key);
        let prefetch = self.prefetch.as_ref();
        let is_prefetched =
            prefetch.is_some_and(|prefetch| prefetch.prefetches.contains(layer_index, key));
        if !is_prefetched && !self.policy.holds(key) && self.slots.free(key, &self.experts) {
            self.actions.freed.push(self.experts.get(key));
        }
    }

    /// Finds the slots of the selected experts.
    fn find_slots(&mut self) {
        for &key in &self.distinct {
            let source = match self.slots.get(key) {
                Some(slot) => Source::Slot(slot),
                None => match self.slots.assign(key, &self.experts) {
                    Some(slot) => Source::Load(slot),
                    None => Source::Uncached,
                },
            };
            self.counts.without_slot += u64::from(source == Source::Uncached);
            let (_, expert) = self.experts.get(key);
            self.actions.used.push(Use { expert, source });
        }
    }

    /// Reports the selected experts to the predictor, and requests those that it predicts.
    fn predict(&mut self, layer_index: usize, is_generated: bool) {
        let Some(prefetch) = &mut self.prefetch else {
            return;
        };
        let predictor = prefetch.predictor.as_mut();
        if !is_generated {
            predictor.observe_prompt(layer_index, &self.selected);
            return;
        }
        predictor.observe(layer_index, &self.distinct);
        let (policy, slots, experts) = (&self.policy, &mut self.slots, &self.experts);
        let (prefetched, loads) = (&mut self.actions.prefetched, &mut self.counts.prefetch);
        let holds = |key| policy.holds(key);
        let n = self.distinct.len();
        prefetch
            .prefetches
            .request(layer_index, n, predictor, holds, |key| {
                loads.moved_bytes = loads.moved_bytes.saturating_add(experts.bytes(key));
                // An expert that a failed copy or a full cache has left without a slot may have one again, or still.
                if slots.get(key).is_none()
                    && let Some(slot) = slots.assign(key, experts)
                {
                    let (layer, expert) = experts.get(key);
                    prefetched.push((layer, expert, slot));
                }
            });
    }
}
