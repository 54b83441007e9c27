//! Frequency-weighted LRU, as expert caches for vLLM (vllm-project/vllm#37190) use the name LFRU: look-ups since the expert
//! came, divided by the look-ups of others since its last one; the lowest goes first, of equal ones the least recently used.
//!
//! Relations change as time passes, so there is no order to keep. But of those with the same count the least recently used
//! goes first, and no expert is older than the least recently used of all: with that age a count gives the lowest score that
//! it can have, and once this is above the lowest score found, no higher count needs a look.

use super::Key;
use super::by_count::ByCount;
use super::demand::EvictionOrder;
use super::list::{Links, List};
use super::room::Room;

/// Counts and times of last use.
pub struct Lfru {
    /// By look-ups since the expert came.
    held: ByCount,
    /// All that are held, in the order of the last use.
    recent: List,
    links: Links,
    /// `[n_keys]`: the clock at the last use.
    last: Vec<u64>,
    clock: u64,
}

impl Lfru {
    /// Of a model with `n_keys` experts.
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
    fn hit(&mut self, key: Key, _room: &Room) {
        self.stamp(key);
        self.held.raise(key);
        self.recent.move_to_back(&mut self.links, key);
    }

    fn insert(&mut self, key: Key, _room: &Room) {
        self.stamp(key);
        self.held.put(key, 1);
        self.recent.push_back(&mut self.links, key);
    }

    fn again(&mut self, key: Key, _room: &Room) {
        self.stamp(key);
        self.held.touch(key);
        self.recent.move_to_back(&mut self.links, key);
    }

    fn evict(&mut self, room: &Room) -> Option<Key> {
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
            // The batch's own are behind all others of their count.
            if !room.is_current(key)
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
