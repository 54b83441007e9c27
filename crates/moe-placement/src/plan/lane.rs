//! A lane of a plan: the part of a hot cache on one GPU, with its own budget.

use std::collections::BTreeMap;

use moe_ids::LayerId;

use super::ranking::Entry;

/// An expert in a lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Selected {
    /// The expert with its hits and score; both are 0 for an expert that only fills free memory.
    pub entry: Entry,
    /// Size of the expert in bytes, without the empty expert of its layer.
    pub bytes: u64,
}

/// The part of the cache on one GPU.
///
/// The fork adds a zero-filled (*empty*) expert for each layer of a lane. Its size is that of the layer's first expert.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lane {
    /// Budget in bytes.
    pub budget_bytes: u64,
    /// Used bytes, including the empty experts. At most `budget_bytes`.
    pub used_bytes: u64,
    /// Experts of the lane, in the order of their selection.
    pub selected: Vec<Selected>,
    /// Number of experts of each layer.
    per_layer: BTreeMap<LayerId, u32>,
}

/// A lane has not enough free memory for an expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct NoRoom {
    /// Bytes that the expert would cost.
    pub(super) cost: u64,
    /// Free bytes of the lane.
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

    /// Number of experts of a layer in the lane, without the empty expert.
    pub fn n_experts(&self, layer: LayerId) -> u32 {
        self.per_layer.get(&layer).copied().unwrap_or(0)
    }

    /// Number of layers with experts in the lane. Each has one empty expert.
    pub fn n_layers(&self) -> usize {
        self.per_layer.len()
    }

    /// Adds an expert if it fits, and returns its cost in bytes. The first expert of a layer costs twice its size, because
    /// each cached layer has an additional zero-filled expert that serves the slots of experts that are not cached.
    pub(super) fn take(&mut self, entry: Entry, bytes: u64) -> Result<u64, NoRoom> {
        let is_first = self.n_experts(entry.layer) == 0;
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
