//! LFU with dynamic aging. The rank of an expert is its look-ups since it was loaded, plus the age of the cache; the age is
//! the rank of the last evicted expert. The expert with the lowest rank is evicted first; ties go to the least recently
//! used. Aging lets experts that are no longer popular leave the cache.
//!
//! Source: Arlitt et al., "Evaluating content management techniques for Web proxy caches" (2000).

use super::Key;
use super::contents::Contents;
use super::demand::EvictionOrder;
use super::rank_queue::RankQueue;

/// Low bits of the heap's rank that hold the clock of the last use. The clock wraps around.
const CLOCK_BITS: u32 = 32;

/// Counts and the age of the cache.
pub struct LfuDa {
    /// `[n_keys]`: look-ups since the expert was loaded.
    counts: Vec<u64>,
    age: u64,
    clock: u64,
    queue: RankQueue,
}

impl LfuDa {
    /// Eviction order for `n_keys` experts.
    pub fn new(n_keys: usize) -> LfuDa {
        LfuDa {
            counts: vec![0; n_keys],
            age: 0,
            clock: 0,
            queue: RankQueue::new(n_keys),
        }
    }

    fn rank(&mut self, key: Key) {
        self.clock = (self.clock + 1) & ((1 << CLOCK_BITS) - 1);
        let count = self.counts[key as usize].saturating_add(self.age);
        let rank = count.min((1 << CLOCK_BITS) - 1) << CLOCK_BITS | self.clock;
        self.queue.set(key, rank);
    }
}

impl EvictionOrder for LfuDa {
    fn hit(&mut self, key: Key, _contents: &Contents) {
        self.counts[key as usize] += 1;
        self.rank(key);
    }

    fn insert(&mut self, key: Key, _contents: &Contents) {
        self.counts[key as usize] = 1;
        self.rank(key);
    }

    fn touch(&mut self, key: Key, _contents: &Contents) {
        self.rank(key);
    }

    fn evict(&mut self, contents: &Contents) -> Option<Key> {
        let (key, rank) = self.queue.pop(contents)?;
        self.age = rank >> CLOCK_BITS;
        Some(key)
    }
}
