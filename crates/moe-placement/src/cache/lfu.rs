//! Least often looked up goes first; of equal ones, the least recently used. Counts are of the whole trace: an expert that
//! went and comes back keeps its own.

use super::Key;
use super::by_count::ByCount;
use super::demand::EvictionOrder;
use super::room::Room;

/// Experts by how often they were looked up.
pub struct Lfu {
    held: ByCount,
}

impl Lfu {
    /// Of a model with `n_keys` experts.
    pub fn new(n_keys: usize) -> Lfu {
        Lfu {
            held: ByCount::new(n_keys),
        }
    }
}

impl EvictionOrder for Lfu {
    fn hit(&mut self, key: Key, _room: &Room) {
        self.held.raise(key);
    }

    fn insert(&mut self, key: Key, _room: &Room) {
        let count = self.held.count(key);
        self.held.put(key, count + 1);
    }

    fn again(&mut self, key: Key, _room: &Room) {
        self.held.touch(key);
    }

    fn evict(&mut self, room: &Room) -> Option<Key> {
        // The batch's own are behind all others of their count.
        let mut fronts = self.held.fronts();
        let (_, key) = fronts.find(|&(_, key)| !room.is_current(key))?;
        drop(fronts);
        self.held.take(key);
        Some(key)
    }
}
