//! Frequency-weighted LRU, as expert caches for vLLM (vllm-project/vllm#37190) use the name LFRU: look-ups since the expert
//! came, divided by the look-ups of others since its last one; the lowest goes first. Relations change as time passes, so
//! each eviction looks at all that is held.

use super::Key;
use super::demand::Order;
use super::room::Room;

/// Counts and times of last use.
pub struct Lfru {
    /// `[n_keys]`: look-ups since the expert came, and the clock at the last one.
    uses: Vec<(u64, u64)>,
    clock: u64,
}

impl Lfru {
    /// Of a model with `n_keys` experts.
    pub fn new(n_keys: usize) -> Lfru {
        Lfru {
            uses: vec![(0, 0); n_keys],
            clock: 0,
        }
    }
}

impl Order for Lfru {
    fn hit(&mut self, key: Key, _room: &Room) {
        self.clock += 1;
        let (count, last) = &mut self.uses[key as usize];
        *count += 1;
        *last = self.clock;
    }

    fn insert(&mut self, key: Key, _room: &Room) {
        self.clock += 1;
        self.uses[key as usize] = (1, self.clock);
    }

    fn again(&mut self, key: Key, _room: &Room) {
        self.clock += 1;
        self.uses[key as usize].1 = self.clock;
    }

    fn evict(&mut self, room: &Room) -> Option<Key> {
        // Of equal scores the least recently used goes; no two have the same time.
        room.lowest(|key| {
            let (count, last) = self.uses[key as usize];
            (count as f64 / (self.clock - last + 1) as f64, last)
        })
    }
}
