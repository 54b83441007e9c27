//! A cache that holds what it holds: the hottest experts by counts made beforehand, or by those of the trace's first part.

use std::sync::Arc;

use super::room::Room;
use super::{Access, Changes, Experts, Key, Policy};

/// The experts with the most counts for each byte, as many as fit; one that does not fit is passed over. Equal ones by key;
/// experts without a count are left out.
pub fn hottest_that_fit(experts: &Experts, counts: &[u64], budget: u64) -> Vec<Key> {
    let counted = (0..).zip(counts.iter().copied().take(experts.len()));
    let mut counted: Vec<(Key, u64)> = counted.filter(|&(_, count)| count > 0).collect();
    // count / bytes, without division.
    let weight = |count: u64, other: Key| u128::from(count) * u128::from(experts.bytes(other));
    counted.sort_by(|a, b| weight(b.1, a.0).cmp(&weight(a.1, b.0)).then(a.0.cmp(&b.0)));
    let mut used = 0u64;
    let mut selected = Vec::new();
    for (key, _) in counted {
        let with = used.saturating_add(experts.bytes(key));
        if with <= budget {
            used = with;
            selected.push(key);
        }
    }
    selected
}

/// The cache.
pub struct Fixed {
    room: Room,
    selected: Vec<Key>,
    learning: Option<Learning>,
}

/// Counting before the choice.
struct Learning {
    /// Look-ups still to count.
    left: u64,
    /// `[n_keys]`
    counts: Vec<u64>,
}

impl Fixed {
    /// Holds these experts from the start.
    pub fn new(experts: Arc<Experts>, budget: u64, selected: Vec<Key>) -> Fixed {
        Fixed {
            room: Room::new(experts, budget),
            selected,
            learning: None,
        }
    }

    /// Holds nothing for so many look-ups, then the hottest of them.
    pub fn learning(experts: Arc<Experts>, budget: u64, look_ups: u64) -> Fixed {
        let learning = Learning {
            left: look_ups,
            counts: vec![0; experts.len()],
        };
        Fixed {
            room: Room::new(experts, budget),
            selected: Vec::new(),
            learning: Some(learning),
        }
    }

    fn load(&mut self, changes: &mut Changes) {
        for key in self.selected.drain(..) {
            self.room.insert(key);
            changes.loaded.push(key);
        }
    }
}

impl Policy for Fixed {
    fn start(&mut self, changes: &mut Changes) {
        self.load(changes);
    }

    fn look_up(&mut self, key: Key) -> Access {
        if let Some(learning) = &mut self.learning {
            learning.counts[key as usize] += 1;
            learning.left = learning.left.saturating_sub(1);
        }
        if self.room.holds(key) {
            Access::Hit
        } else {
            Access::Passed
        }
    }

    fn look_up_again(&mut self, _key: Key) {}

    fn end_batch(&mut self, changes: &mut Changes) {
        if let Some(learning) = self.learning.take_if(|learning| learning.left == 0) {
            self.selected =
                hottest_that_fit(self.room.experts(), &learning.counts, self.room.budget());
            self.load(changes);
        }
    }

    fn holds(&self, key: Key) -> bool {
        self.room.holds(key)
    }

    fn used_bytes(&self) -> u64 {
        self.room.used()
    }
}
