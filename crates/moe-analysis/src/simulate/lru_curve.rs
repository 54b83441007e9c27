//! LRU at all budgets in one pass, where all experts have the same size (Mattson et al., "Evaluation techniques for storage
//! hierarchies", 1970).
//!
//! Between batches an LRU cache holds the most recent experts: as many as fit, or the whole batch that just ended, if that
//! is more. So a look-up hits if its expert's depth among the recent ones, before its batch, is no more than that.

use super::{Batches, Outcome};
use crate::stack::LruStack;

/// Look-ups by the number of experts that a cache must hold to hit them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LruCurve {
    bytes: u64,
    /// `[n_keys + 1]`, by phase; index 0: hit by every cache.
    depths: Vec<[u64; 3]>,
    look_ups: [u64; 3],
    /// Distinct experts, and those of the last batch.
    distinct: u64,
    last_batch: u64,
}

impl LruCurve {
    /// `None` where sizes differ.
    pub fn new(batches: &Batches) -> Option<LruCurve> {
        let experts = batches.experts();
        let n_keys = experts.len();
        let mut stack = LruStack::new(vec![1; n_keys]);
        let mut curve = LruCurve {
            bytes: experts.equal_bytes()?,
            depths: vec![[0; 3]; n_keys + 1],
            look_ups: [0; 3],
            distinct: 0,
            last_batch: 0,
        };
        for batch in batches.iter() {
            let phase = batch.phase();
            let mut size = 0;
            for key in batch.look_ups() {
                size += 1;
                match stack.distance(key as usize) {
                    Some(distance) => {
                        let depth = distance + 1;
                        let is_sure = depth <= curve.last_batch;
                        let index = if is_sure { 0 } else { depth as usize };
                        curve.depths[index][phase] += 1;
                    }
                    None => curve.distinct += 1,
                }
            }
            curve.look_ups[phase] += size;
            for (key, _) in batch.choices() {
                stack.touch(key as usize);
            }
            curve.last_batch = size;
        }
        Some(curve)
    }

    /// What a cache of a budget does.
    pub fn outcome(&self, budget: u64) -> Outcome {
        let slots = budget / self.bytes.max(1);
        let fitting = usize::try_from(slots).unwrap_or(usize::MAX);
        let mut hits = [0; 3];
        for depths in self.depths.iter().take(fitting.saturating_add(1)) {
            for (hits, depth) in hits.iter_mut().zip(depths) {
                *hits += depth;
            }
        }
        let misses: [u64; 3] = std::array::from_fn(|phase| self.look_ups[phase] - hits[phase]);
        let held = self.distinct.min(slots.max(self.last_batch));
        Outcome {
            look_ups: self.look_ups,
            hits,
            read_bytes: misses.map(|misses| misses.saturating_mul(self.bytes)),
            loaded_bytes: 0,
            evictions: misses.iter().sum::<u64>() - held,
        }
    }
}
