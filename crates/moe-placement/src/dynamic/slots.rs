//! Slots of equal size for the experts of each class of layers.

use moe_ids::LayerId;

use super::Settings;
use crate::cache::{Experts, Key, PolicyName};

/// Number of a slot in its class, from 0.
pub type Slot = u32;

/// The slots of all classes.
#[derive(Debug)]
pub(super) struct Slots {
    classes: Vec<Class>,
    /// `[n_layer]`: class of a layer, by its index among the layers with experts.
    class_of: Vec<usize>,
    /// `[n_keys]`: slot of each expert.
    slots: Vec<Option<Slot>>,
}

#[derive(Debug, Clone, Default)]
struct Class {
    /// Slots for the budget, and for prefetched experts.
    n: [usize; 2],
    free: Vec<Slot>,
    /// Whether the slots suffice for what the policy holds between single tokens.
    suffices: bool,
}

impl Slots {
    /// Free slots for the budget and the prefetched experts of `settings`.
    ///
    /// A policy with one cache per layer gives each layer the same bytes. Other policies have one budget, which is distributed
    /// over the classes in proportion to the bytes of all their experts.
    pub(super) fn new(
        experts: &Experts,
        class: impl Fn(LayerId) -> usize,
        n_expert_used: usize,
        settings: &Settings,
    ) -> Slots {
        let n_layer = experts.n_layer();
        // Experts of each layer, and bytes of one of them.
        let layers: Vec<(usize, u64)> = (0..n_layer)
            .map(|layer| {
                let keys = experts.keys_of(layer);
                (keys.len(), keys.start)
            })
            .map(|(n, first)| (n, experts.bytes(first).max(1)))
            .collect();
        let class_of: Vec<usize> = (0..n_layer)
            .map(|layer| class(experts.get(experts.keys_of(layer).start).0))
            .collect();
        let n_classes = class_of.iter().map(|class| class + 1).max().unwrap_or(0);
        let mut classes = vec![Class::default(); n_classes];
        let total: u128 = layers
            .iter()
            .map(|&(n, bytes)| n as u128 * u128::from(bytes))
            .sum();
        let budget = settings.budget_bytes;
        for (index, class) in classes.iter_mut().enumerate() {
            let of_class = class_of.iter().zip(&layers).filter(|&(&of, _)| of == index);
            let of_class: Vec<(usize, u64)> = of_class.map(|(_, &layer)| layer).collect();
            let all: usize = of_class.iter().map(|&(n, _)| n).sum();
            let fits = |share: u128, bytes: u64| {
                usize::try_from(share / u128::from(bytes)).unwrap_or(usize::MAX)
            };
            let cached = match settings.policy {
                PolicyName::Layered(_) => {
                    let share = u128::from(budget / n_layer.max(1) as u64);
                    of_class
                        .iter()
                        .map(|&(n, bytes)| fits(share, bytes).min(n))
                        .sum()
                }
                _ => {
                    let bytes = of_class.first().map_or(1, |&(_, bytes)| bytes);
                    // At most 2^64 · 2^64.
                    let part = u128::from(bytes).saturating_mul(all as u128);
                    let share = match n_classes {
                        1 => u128::from(budget),
                        _ => u128::from(budget).saturating_mul(part) / total.max(1),
                    };
                    fits(share, bytes).min(all)
                }
            };
            let prefetched = settings.predictor.map_or(0, |_| {
                let layers = of_class.len().min(settings.depth);
                let each = settings.n_predict.unwrap_or(n_expert_used);
                layers.saturating_mul(each).min(all - cached)
            });
            class.n = [cached, prefetched];
            class.suffices = match settings.policy {
                PolicyName::Layered(_) => {
                    let share = u128::from(budget / n_layer.max(1) as u64);
                    let has_room = |&(_, bytes): &(usize, u64)| fits(share, bytes) >= n_expert_used;
                    of_class.iter().all(has_room)
                }
                _ => of_class.len() == n_layer && cached >= n_expert_used,
            };
            let end = Slot::try_from(cached + prefetched).unwrap_or(Slot::MAX);
            // The first slots are used first.
            class.free = (0..end).rev().collect();
        }
        Slots {
            classes,
            class_of,
            slots: vec![None; experts.len()],
        }
    }

    /// Whether the slots of a layer suffice for what the policy holds between single tokens.
    pub(super) fn suffice(&self, layer_index: usize) -> bool {
        self.classes[self.class_of[layer_index]].suffices
    }

    /// Number of slots of each class: for the budget, and for prefetched experts.
    pub(super) fn numbers(&self) -> Vec<[usize; 2]> {
        self.classes.iter().map(|class| class.n).collect()
    }

    /// Whether there are no slots.
    pub(super) fn is_empty(&self) -> bool {
        self.classes.iter().all(|class| class.n == [0, 0])
    }

    /// Removes the slots that experts of a layer can have.
    pub(super) fn remove(&mut self, layer_index: usize) {
        self.classes[self.class_of[layer_index]] = Class::default();
    }

    /// Slot of an expert.
    pub(super) fn get(&self, key: Key) -> Option<Slot> {
        self.slots[key as usize]
    }

    /// Assigns a free slot to an expert that has none; `None` without a free slot.
    pub(super) fn assign(&mut self, key: Key, experts: &Experts) -> Option<Slot> {
        let class = self.class_of[experts.layer_index(key)];
        let slot = self.classes[class].free.pop()?;
        self.slots[key as usize] = Some(slot);
        Some(slot)
    }

    /// Frees the slot of an expert. Returns whether it had one.
    pub(super) fn free(&mut self, key: Key, experts: &Experts) -> bool {
        let class = self.class_of[experts.layer_index(key)];
        let slot = self.slots[key as usize].take();
        self.classes[class].free.extend(slot);
        slot.is_some()
    }
}
