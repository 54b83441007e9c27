//! CLOCK (second chance): first in, first out, except that an expert used since the hand last passed it is skipped once.
//!
//! Source: F. J. Corbató, "A paging experiment with the Multics system" (1968).

use super::Key;
use super::contents::Contents;
use super::demand::EvictionOrder;
use super::list::{Links, List};

/// The ring as a list that starts at the hand.
pub struct Clock {
    links: Links,
    ring: List,
    /// `[n_keys]`: used since the hand last passed.
    is_used: Vec<bool>,
}

impl Clock {
    /// Eviction order for `n_keys` experts.
    pub fn new(n_keys: usize) -> Clock {
        Clock {
            links: Links::new(n_keys),
            ring: List::EMPTY,
            is_used: vec![false; n_keys],
        }
    }
}

impl EvictionOrder for Clock {
    fn hit(&mut self, key: Key, _contents: &Contents) {
        self.is_used[key as usize] = true;
    }

    fn insert(&mut self, key: Key, _contents: &Contents) {
        self.is_used[key as usize] = false;
        self.ring.push_back(&mut self.links, key);
    }

    fn touch(&mut self, _key: Key, _contents: &Contents) {}

    fn evict(&mut self, contents: &Contents) -> Option<Key> {
        loop {
            let key = self
                .ring
                .find(&self.links, |key| !contents.is_current(key))?;
            if !std::mem::take(&mut self.is_used[key as usize]) {
                self.ring.remove(&mut self.links, key);
                return Some(key);
            }
            self.ring.move_to_back(&mut self.links, key);
        }
    }
}
