//! ARC, with sizes in bytes: experts looked up once (T1) and experts looked up repeatedly (T2) share the budget. A look-up
//! of a recently evicted expert (a ghost in B1 or B2) moves the border between T1 and T2 in favor of that expert's list.
//!
//! Source: Megiddo and Modha, "ARC: a self-tuning, low overhead replacement cache" (FAST 2003). The lists and the target `p`
//! count bytes here and pages there.

use super::Key;
use super::contents::Contents;
use super::demand::EvictionOrder;
use super::list::{Links, List};

/// The lists of the paper. B1 and B2 hold ghosts: experts that were evicted from T1 and T2.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ListId {
    T1,
    T2,
    B1,
    B2,
}

const N_LISTS: usize = 4;

/// The four lists, each from the least to the most recently used expert.
pub struct Arc {
    links: Links,
    lists: [List; N_LISTS],
    bytes: [u64; N_LISTS],
    /// `[n_keys]`: the list that contains the expert.
    list_of: Vec<Option<ListId>>,
    /// Target size of T1 in bytes (`p` in the paper).
    target: u64,
}

impl Arc {
    /// Eviction order for `n_keys` experts.
    pub fn new(n_keys: usize) -> Arc {
        Arc {
            links: Links::new(n_keys),
            lists: [List::EMPTY; N_LISTS],
            bytes: [0; N_LISTS],
            list_of: vec![None; n_keys],
            target: 0,
        }
    }

    fn bytes_of(&self, list: ListId) -> u64 {
        self.bytes[list as usize]
    }

    fn take(&mut self, key: Key, contents: &Contents) {
        if let Some(list) = self.list_of[key as usize].take() {
            self.lists[list as usize].remove(&mut self.links, key);
            self.bytes[list as usize] -= contents.experts().bytes(key);
        }
    }

    fn put(&mut self, key: Key, list: ListId, contents: &Contents) {
        self.take(key, contents);
        self.lists[list as usize].push_back(&mut self.links, key);
        self.bytes[list as usize] += contents.experts().bytes(key);
        self.list_of[key as usize] = Some(list);
    }

    /// Bytes by which a hit in the ghost list `hit` moves the target: `bytes × max(1, size of other / size of hit)`.
    #[expect(clippy::cast_possible_truncation, reason = "the cast saturates")]
    fn step(&self, bytes: u64, hit: ListId, other: ListId) -> u64 {
        let ratio = self.bytes_of(other) as f64 / self.bytes_of(hit).max(1) as f64;
        (bytes as f64 * ratio.max(1.0)) as u64
    }

    /// Drops ghosts until T1 and B1 together fit the budget, and all four lists fit twice the budget.
    fn trim(&mut self, contents: &Contents) {
        let budget = contents.budget();
        loop {
            let recent = self.bytes_of(ListId::T1) + self.bytes_of(ListId::B1);
            let frequent = self.bytes_of(ListId::T2) + self.bytes_of(ListId::B2);
            let oldest = |list: ListId| self.lists[list as usize].front();
            let oldest_ghost = if recent > budget && oldest(ListId::B1).is_some() {
                oldest(ListId::B1)
            } else if recent + frequent > budget.saturating_mul(2) {
                oldest(ListId::B2)
            } else {
                None
            };
            let Some(key) = oldest_ghost else { break };
            self.take(key, contents);
        }
    }
}

impl EvictionOrder for Arc {
    fn hit(&mut self, key: Key, contents: &Contents) {
        self.put(key, ListId::T2, contents);
    }

    fn insert(&mut self, key: Key, contents: &Contents) {
        let bytes = contents.experts().bytes(key);
        let list = match self.list_of[key as usize] {
            Some(ListId::B1) => {
                let step = self.step(bytes, ListId::B1, ListId::B2);
                self.target = self.target.saturating_add(step).min(contents.budget());
                ListId::T2
            }
            Some(ListId::B2) => {
                let step = self.step(bytes, ListId::B2, ListId::B1);
                self.target = self.target.saturating_sub(step);
                ListId::T2
            }
            _ => ListId::T1,
        };
        self.put(key, list, contents);
    }

    fn touch(&mut self, key: Key, _contents: &Contents) {
        if let Some(list) = self.list_of[key as usize] {
            self.lists[list as usize].move_to_back(&mut self.links, key);
        }
    }

    fn evict(&mut self, contents: &Contents) -> Option<Key> {
        let evictable = |list: ListId| {
            let list = &self.lists[list as usize];
            list.find(&self.links, |key| !contents.is_current(key))
        };
        let key = if self.bytes_of(ListId::T1) > self.target {
            evictable(ListId::T1).or_else(|| evictable(ListId::T2))?
        } else {
            evictable(ListId::T2).or_else(|| evictable(ListId::T1))?
        };
        let ghost = match self.list_of[key as usize] {
            Some(ListId::T1) => ListId::B1,
            _ => ListId::B2,
        };
        self.put(key, ghost, contents);
        self.trim(contents);
        Some(key)
    }
}
