//! LFRU: frequency divided by recency. The score of an expert is its look-ups since it was loaded, divided by 1 + the number
//! of uses of other experts since its last use. The expert with the lowest score is evicted first; ties go to the least
//! recently used.
//!
//! Source: the expert cache for vLLM in <https://github.com/vllm-project/vllm/pull/37190>.
//!
//! Scores change with every use, so no sorted order can be kept. An eviction visits the counts in ascending order and
//! compares the least recently used expert of each count. No expert is older than the least recently used expert of all. The
//! score of a count at that age is a lower bound for the count and for all higher counts. The search stops when the bound
//! exceeds the lowest score found.

use super::Key;
use super::by_count::ByCount;
use super::contents::Contents;
use super::demand::EvictionOrder;
use super::list::{Links, List};

/// Counts and times of the last use.
pub struct Lfru {
    /// Resident experts by look-ups since they were loaded.
    held: ByCount,
    /// Resident experts, from the least to the most recently used.
    recent: List,
    links: Links,
    /// `[n_keys]`: clock at the last use.
    last: Vec<u64>,
    clock: u64,
}

impl Lfru {
    /// Eviction order for `n_keys` experts.
    pub fn new(n_keys: usize) -> Lfru {
        Lfru {
            held: ByCount::new(n_keys),
            recent: List::EMPTY,
            links: Links::new(n_keys),
            last: vec![0; n_keys],
            clock: 0,
        }
    }

    fn stamp(&mut self, key: Key) {
        self.clock += 1;
        self.last[key as usize] = self.clock;
    }
}

impl EvictionOrder for Lfru {
    fn hit(&mut self, key: Key, _contents: &Contents) {
        self.stamp(key);
        self.held.raise(key);
        self.recent.move_to_back(&mut self.links, key);
    }

    fn insert(&mut self, key: Key, _contents: &Contents) {
        self.stamp(key);
        self.held.put(key, 1);
        self.recent.push_back(&mut self.links, key);
    }

    fn touch(&mut self, key: Key, _contents: &Contents) {
        self.stamp(key);
        self.held.touch(key);
        self.recent.move_to_back(&mut self.links, key);
    }

    fn evict(&mut self, contents: &Contents) -> Option<Key> {
        let (last, clock) = (&self.last, self.clock);
        let score = |count: u32, key: Key| {
            let age = clock - last[key as usize] + 1;
            f64::from(count) / age as f64
        };
        let oldest = self.recent.front()?;
        let mut lowest: Option<(f64, u64, Key)> = None;
        for (count, key) in self.held.fronts() {
            if lowest.is_some_and(|(least, ..)| score(count, oldest) > least) {
                break;
            }
            let (score, last) = (score(count, key), last[key as usize]);
            // Experts of the current batch are the most recently used of their count.
            if !contents.is_current(key)
                && lowest.is_none_or(|(least, at, _)| (score, last) < (least, at))
            {
                lowest = Some((score, last, key));
            }
        }
        let (.., key) = lowest?;
        self.held.take(key);
        self.recent.remove(&mut self.links, key);
        Some(key)
    }
}
