//! Segmented LRU (Karedla, Love, Wherry, "Caching strategies to improve disk system performance", 1994): what comes is on
//! probation and goes first; a hit protects it, in at most four fifths of the budget.

use super::Key;
use super::demand::EvictionOrder;
use super::list::{Links, List};
use super::room::Room;

/// The two segments, each in the order of the last use.
pub struct Slru {
    links: Links,
    probation: List,
    protected: List,
    /// `[n_keys]`
    is_protected: Vec<bool>,
    protected_bytes: u64,
}

impl Slru {
    /// Of a model with `n_keys` experts.
    pub fn new(n_keys: usize) -> Slru {
        Slru {
            links: Links::new(n_keys),
            probation: List::EMPTY,
            protected: List::EMPTY,
            is_protected: vec![false; n_keys],
            protected_bytes: 0,
        }
    }

    fn take(&mut self, key: Key, room: &Room) {
        if self.is_protected[key as usize] {
            self.protected.remove(&mut self.links, key);
            self.protected_bytes -= room.experts().bytes(key);
            self.is_protected[key as usize] = false;
        } else {
            self.probation.remove(&mut self.links, key);
        }
    }
}

impl EvictionOrder for Slru {
    fn hit(&mut self, key: Key, room: &Room) {
        self.take(key, room);
        self.is_protected[key as usize] = true;
        self.protected.push_back(&mut self.links, key);
        self.protected_bytes += room.experts().bytes(key);
        while self.protected_bytes > room.budget() / 5 * 4 {
            let Some(key) = self.protected.front() else {
                break;
            };
            self.take(key, room);
            self.probation.push_back(&mut self.links, key);
        }
    }

    fn insert(&mut self, key: Key, _room: &Room) {
        self.probation.push_back(&mut self.links, key);
    }

    fn again(&mut self, key: Key, _room: &Room) {
        let list = if self.is_protected[key as usize] {
            &mut self.protected
        } else {
            &mut self.probation
        };
        list.move_to_back(&mut self.links, key);
    }

    fn evict(&mut self, room: &Room) -> Option<Key> {
        let may_go = |list: &List| list.find(&self.links, |key| !room.is_current(key));
        let key = may_go(&self.probation).or_else(|| may_go(&self.protected))?;
        self.take(key, room);
        Some(key)
    }
}
