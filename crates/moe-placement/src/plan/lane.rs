//! One lane: a budget and what fits into it.

use std::collections::BTreeMap;

use moe_ids::LayerId;

use super::ranking::Entry;

/// An expert in the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Selected {
    /// The expert, with its score; both 0 for one that only fills room.
    pub entry: Entry,
    /// Its bytes, the layer's empty expert not counted.
    pub bytes: u64,
}

/// The cache of one device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lane {
    /// Bytes that it may take.
    pub budget_bytes: u64,
    /// Bytes that it takes, empty experts included.
    pub used_bytes: u64,
    /// Its experts, in the order in which they were taken.
    pub selected: Vec<Selected>,
    /// Experts of each layer.
    per_layer: BTreeMap<LayerId, u32>,
}

/// An expert that a lane had no room for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct NoRoom {
    /// Bytes that it would have cost.
    pub(super) cost: u64,
    /// Bytes that were left.
    pub(super) free: u64,
}

impl Lane {
    pub(super) fn new(budget_bytes: u64) -> Lane {
        Lane {
            budget_bytes,
            used_bytes: 0,
            selected: Vec::new(),
            per_layer: BTreeMap::new(),
        }
    }

    /// Experts of a layer that the lane holds.
    pub fn n_of_layer(&self, layer: LayerId) -> u32 {
        self.per_layer.get(&layer).copied().unwrap_or(0)
    }

    /// Layers that the lane holds experts of; each has an empty expert of zeros too.
    pub fn n_layers(&self) -> usize {
        self.per_layer.len()
    }

    /// Takes an expert if it fits; gives the bytes that it costs. The first of a layer costs double: each layer in the cache
    /// has one expert of zeros, to which the slots that the cache does not hold are directed.
    pub(super) fn take(&mut self, entry: Entry, bytes: u64) -> Result<u64, NoRoom> {
        let is_first = self.n_of_layer(entry.layer) == 0;
        let cost = if is_first {
            bytes.checked_mul(2)
        } else {
            Some(bytes)
        };
        let free = self.budget_bytes - self.used_bytes;
        match cost {
            Some(cost) if cost <= free => {
                self.used_bytes += cost;
                self.selected.push(Selected { entry, bytes });
                *self.per_layer.entry(entry.layer).or_default() += 1;
                Ok(cost)
            }
            _ => Err(NoRoom {
                cost: cost.unwrap_or(u64::MAX),
                free,
            }),
        }
    }
}
