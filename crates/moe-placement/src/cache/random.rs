//! Random eviction, reproducible by its seed.

use crate::random::SplitMix64;

use super::Key;
use super::contents::Contents;
use super::demand::EvictionOrder;

/// Random eviction order.
pub struct Random {
    rng: SplitMix64,
}

impl Random {
    /// Eviction order that depends only on `seed` and the look-ups.
    pub fn new(seed: u64) -> Random {
        Random {
            rng: SplitMix64::new(seed),
        }
    }
}

impl EvictionOrder for Random {
    fn hit(&mut self, _key: Key, _contents: &Contents) {}

    fn insert(&mut self, _key: Key, _contents: &Contents) {}

    fn touch(&mut self, _key: Key, _contents: &Contents) {}

    fn evict(&mut self, contents: &Contents) -> Option<Key> {
        let held = contents.held();
        let first = self.rng.below(held.len());
        // Scans from the random position on for an expert that is not in the current batch.
        let (before, after) = held.split_at_checked(first)?;
        let mut candidates = after.iter().chain(before).copied();
        candidates.find(|&key| !contents.is_current(key))
    }
}
