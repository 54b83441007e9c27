//! Any expert goes, as a seed says.

use crate::random::SplitMix64;

use super::Key;
use super::demand::EvictionOrder;
use super::room::Room;

/// The dice.
pub struct Random {
    dice: SplitMix64,
}

impl Random {
    /// The same seed gives the same evictions.
    pub fn new(seed: u64) -> Random {
        Random {
            dice: SplitMix64::new(seed),
        }
    }
}

impl EvictionOrder for Random {
    fn hit(&mut self, _key: Key, _room: &Room) {}

    fn insert(&mut self, _key: Key, _room: &Room) {}

    fn again(&mut self, _key: Key, _room: &Room) {}

    fn evict(&mut self, room: &Room) -> Option<Key> {
        let held = room.held();
        let first = self.dice.below(held.len());
        // From there on the first that may go.
        let (before, behind) = held.split_at_checked(first)?;
        let mut candidates = behind.iter().chain(before).copied();
        candidates.find(|&key| !room.is_current(key))
    }
}
