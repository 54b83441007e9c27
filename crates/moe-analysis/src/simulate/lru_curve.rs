//! LRU for all budgets in one pass over the trace, if all experts have the same size.
//!
//! Between batches an LRU cache contains the most recently used experts: as many as fit, or the entire last batch if it is
//! larger. A look-up is a hit if the stack distance of its expert before the batch is within this number.
//!
//! Source: Mattson et al., "Evaluation techniques for storage hierarchies" (1970).

use super::{Batches, Outcome};
use crate::stack::LruStack;

/// Hits of LRU caches of all sizes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LruCurve {
    bytes: u64,
    /// `[n_keys + 1][phase]`: look-ups by the number of experts that a cache must hold for a hit. Index 0: hits in every
    /// cache.
    depths: Vec<[u64; 3]>,
    look_ups: [u64; 3],
    /// Number of distinct experts in the trace.
    distinct: u64,
    /// Number of distinct experts in the last batch.
    last_batch: u64,
}

impl LruCurve {
    /// Simulates a trace; `None` if the sizes of the experts differ.
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
                        let is_certain = depth <= curve.last_batch;
                        let index = if is_certain { 0 } else { depth as usize };
                        curve.depths[index][phase] += 1;
                    }
                    None => curve.distinct += 1,
                }
            }
            curve.look_ups[phase] += size;
            for (key, _) in batch.selections() {
                stack.touch(key as usize);
            }
            curve.last_batch = size;
        }
        Some(curve)
    }

    /// Result for a budget in bytes.
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
