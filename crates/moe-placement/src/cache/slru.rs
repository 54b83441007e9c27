//! Segmented LRU: a new expert enters the probation segment, from which experts are evicted first. A hit moves the expert to
//! the protected segment, which holds at most four fifths of the budget.
//!
//! Source: Karedla, Love and Wherry, "Caching strategies to improve disk system performance" (1994).

use super::Key;
use super::contents::Contents;
use super::demand::EvictionOrder;
use super::list::{Links, List};

/// The two segments, each from the least to the most recently used expert.
pub struct Slru {
    links: Links,
    probation: List,
    protected: List,
    /// `[n_keys]`: whether the expert is in the protected segment.
    is_protected: Vec<bool>,
    protected_bytes: u64,
}

impl Slru {
    /// Eviction order for `n_keys` experts.
    pub fn new(n_keys: usize) -> Slru {
        Slru {
            links: Links::new(n_keys),
            probation: List::EMPTY,
            protected: List::EMPTY,
            is_protected: vec![false; n_keys],
            protected_bytes: 0,
        }
    }

    fn take(&mut self, key: Key, contents: &Contents) {
        if self.is_protected[key as usize] {
            self.protected.remove(&mut self.links, key);
            self.protected_bytes -= contents.experts().bytes(key);
            self.is_protected[key as usize] = false;
        } else {
            self.probation.remove(&mut self.links, key);
        }
    }
}

impl EvictionOrder for Slru {
    fn hit(&mut self, key: Key, contents: &Contents) {
        self.take(key, contents);
        self.is_protected[key as usize] = true;
        self.protected.push_back(&mut self.links, key);
        self.protected_bytes += contents.experts().bytes(key);
        while self.protected_bytes > contents.budget() / 5 * 4 {
            let Some(key) = self.protected.front() else {
                break;
            };
            self.take(key, contents);
            self.probation.push_back(&mut self.links, key);
        }
    }

    fn insert(&mut self, key: Key, _contents: &Contents) {
        self.probation.push_back(&mut self.links, key);
    }

    fn touch(&mut self, key: Key, _contents: &Contents) {
        let list = if self.is_protected[key as usize] {
            &mut self.protected
        } else {
            &mut self.probation
        };
        list.move_to_back(&mut self.links, key);
    }

    fn evict(&mut self, contents: &Contents) -> Option<Key> {
        let evictable = |list: &List| list.find(&self.links, |key| !contents.is_current(key));
        let key = evictable(&self.probation).or_else(|| evictable(&self.protected))?;
        self.take(key, contents);
        Some(key)
    }
}
