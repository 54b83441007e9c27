//! LFU: evicts the expert with the fewest look-ups; ties go to the least recently used. Counts cover the entire trace: an
//! expert keeps its count while it is evicted.

use super::Key;
use super::by_count::ByCount;
use super::contents::Contents;
use super::demand::EvictionOrder;

/// Resident experts ordered by look-ups.
pub struct Lfu {
    held: ByCount,
}

impl Lfu {
    /// Eviction order for `n_keys` experts.
    pub fn new(n_keys: usize) -> Lfu {
        Lfu {
            held: ByCount::new(n_keys),
        }
    }
}

impl EvictionOrder for Lfu {
    fn hit(&mut self, key: Key, _contents: &Contents) {
        self.held.raise(key);
    }

    fn insert(&mut self, key: Key, _contents: &Contents) {
        let count = self.held.count(key);
        self.held.put(key, count + 1);
    }

    fn touch(&mut self, key: Key, _contents: &Contents) {
        self.held.touch(key);
    }

    fn evict(&mut self, contents: &Contents) -> Option<Key> {
        // Experts of the current batch are the most recently used of their count.
        let mut fronts = self.held.fronts();
        let (_, key) = fronts.find(|&(_, key)| !contents.is_current(key))?;
        drop(fronts);
        self.held.take(key);
        Some(key)
    }
}
