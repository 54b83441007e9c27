//! CLOCK: first in, first out, but what was used since the hand last passed is passed over once.

use super::Key;
use super::demand::EvictionOrder;
use super::list::{Links, List};
use super::room::Room;

/// The ring, cut where the hand stands.
pub struct SecondChance {
    links: Links,
    ring: List,
    /// `[n_keys]`: used since the hand passed.
    is_used: Vec<bool>,
}

impl SecondChance {
    /// Of a model with `n_keys` experts.
    pub fn new(n_keys: usize) -> SecondChance {
        SecondChance {
            links: Links::new(n_keys),
            ring: List::EMPTY,
            is_used: vec![false; n_keys],
        }
    }
}

impl EvictionOrder for SecondChance {
    fn hit(&mut self, key: Key, _room: &Room) {
        self.is_used[key as usize] = true;
    }

    fn insert(&mut self, key: Key, _room: &Room) {
        self.is_used[key as usize] = false;
        self.ring.push_back(&mut self.links, key);
    }

    fn again(&mut self, _key: Key, _room: &Room) {}

    fn evict(&mut self, room: &Room) -> Option<Key> {
        loop {
            let key = self.ring.find(&self.links, |key| !room.is_current(key))?;
            if !std::mem::take(&mut self.is_used[key as usize]) {
                self.ring.remove(&mut self.links, key);
                return Some(key);
            }
            self.ring.move_to_back(&mut self.links, key);
        }
    }
}
