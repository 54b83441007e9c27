//! LRU: evicts the least recently used expert.

use super::Key;
use super::contents::Contents;
use super::demand::EvictionOrder;
use super::list::{Links, List};

/// Resident experts, from the least to the most recently used.
pub struct Lru {
    links: Links,
    list: List,
}

impl Lru {
    /// Eviction order for `n_keys` experts.
    pub fn new(n_keys: usize) -> Lru {
        Lru {
            links: Links::new(n_keys),
            list: List::EMPTY,
        }
    }
}

impl EvictionOrder for Lru {
    fn hit(&mut self, key: Key, _contents: &Contents) {
        self.list.move_to_back(&mut self.links, key);
    }

    fn insert(&mut self, key: Key, _contents: &Contents) {
        self.list.push_back(&mut self.links, key);
    }

    fn touch(&mut self, key: Key, _contents: &Contents) {
        self.list.move_to_back(&mut self.links, key);
    }

    fn evict(&mut self, contents: &Contents) -> Option<Key> {
        // Experts of the current batch are the most recently used ones.
        let key = self.list.front().filter(|&key| !contents.is_current(key))?;
        self.list.remove(&mut self.links, key);
        Some(key)
    }
}
