//! LFU with dynamic aging (Arlitt et al., "Evaluating content management techniques for Web proxy caches", 2000): an expert's
//! rank is how often it was looked up since it came, plus the rank of the last one that went, so what was popular once goes
//! in the end. Of equal ones, the least recently used.

use super::Key;
use super::demand::EvictionOrder;
use super::ranked::Ranked;
use super::room::Room;

/// Bits of the clock below the rank; what is older than its range counts as equally old.
const CLOCK_BITS: u32 = 32;

/// Counts and ages.
pub struct LfuDa {
    /// `[n_keys]`: look-ups since the expert came.
    counts: Vec<u64>,
    age: u64,
    clock: u64,
    ranked: Ranked,
}

impl LfuDa {
    /// Of a model with `n_keys` experts.
    pub fn new(n_keys: usize) -> LfuDa {
        LfuDa {
            counts: vec![0; n_keys],
            age: 0,
            clock: 0,
            ranked: Ranked::new(n_keys),
        }
    }

    fn rank(&mut self, key: Key) {
        self.clock = (self.clock + 1) & ((1 << CLOCK_BITS) - 1);
        let count = self.counts[key as usize].saturating_add(self.age);
        let rank = count.min((1 << CLOCK_BITS) - 1) << CLOCK_BITS | self.clock;
        self.ranked.set(key, rank);
    }
}

impl EvictionOrder for LfuDa {
    fn hit(&mut self, key: Key, _room: &Room) {
        self.counts[key as usize] += 1;
        self.rank(key);
    }

    fn insert(&mut self, key: Key, _room: &Room) {
        self.counts[key as usize] = 1;
        self.rank(key);
    }

    fn again(&mut self, key: Key, _room: &Room) {
        self.rank(key);
    }

    fn evict(&mut self, room: &Room) -> Option<Key> {
        let (key, rank) = self.ranked.pop(room)?;
        self.age = rank >> CLOCK_BITS;
        Some(key)
    }
}
