//! Least recently used goes first.

use super::Key;
use super::demand::EvictionOrder;
use super::list::{Links, List};
use super::room::Room;

/// The order of the last use.
pub struct Lru {
    links: Links,
    list: List,
}

impl Lru {
    /// Of a model with `n_keys` experts.
    pub fn new(n_keys: usize) -> Lru {
        Lru {
            links: Links::new(n_keys),
            list: List::EMPTY,
        }
    }
}

impl EvictionOrder for Lru {
    fn hit(&mut self, key: Key, _room: &Room) {
        self.list.move_to_back(&mut self.links, key);
    }

    fn insert(&mut self, key: Key, _room: &Room) {
        self.list.push_back(&mut self.links, key);
    }

    fn again(&mut self, key: Key, _room: &Room) {
        self.list.move_to_back(&mut self.links, key);
    }

    fn evict(&mut self, room: &Room) -> Option<Key> {
        // The batch's own are behind all others.
        let key = self.list.front().filter(|&key| !room.is_current(key))?;
        self.list.remove(&mut self.links, key);
        Some(key)
    }
}
