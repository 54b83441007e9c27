//! A static cache of the hottest experts, by known counts or by the counts of the first part of the trace.

use std::sync::Arc;

use super::contents::Contents;
use super::{Access, Changes, Experts, Key, Policy};

/// The experts with the most counts per byte that fit in `budget` bytes, best first.
///
/// `counts` is the number of look-ups of each expert (`[n_keys]`). An expert that does not fit is skipped. Ties go to the lower
/// key. Experts with a count of 0 are never selected.
pub fn hottest_that_fit(experts: &Experts, counts: &[u64], budget: u64) -> Vec<Key> {
    let counted = (0..).zip(counts.iter().copied().take(experts.len()));
    let mut counted: Vec<(Key, u64)> = counted.filter(|&(_, count)| count > 0).collect();
    // Compares count / bytes without a division.
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

/// A cache with fixed contents.
pub struct Fixed {
    contents: Contents,
    selected: Vec<Key>,
    training: Option<Training>,
}

/// Counters of the training look-ups.
struct Training {
    /// Look-ups that remain to be counted.
    left: u64,
    /// `[n_keys]`: look-ups of each expert.
    counts: Vec<u64>,
}

impl Fixed {
    /// Holds `selected` from the start.
    pub fn new(experts: Arc<Experts>, budget: u64, selected: Vec<Key>) -> Fixed {
        Fixed {
            contents: Contents::new(experts, budget),
            selected,
            training: None,
        }
    }

    /// Stays empty for `look_ups` look-ups, then loads the hottest experts of these look-ups.
    pub fn trained_on_first(experts: Arc<Experts>, budget: u64, look_ups: u64) -> Fixed {
        let training = Training {
            left: look_ups,
            counts: vec![0; experts.len()],
        };
        Fixed {
            contents: Contents::new(experts, budget),
            selected: Vec::new(),
            training: Some(training),
        }
    }

    fn load(&mut self, changes: &mut Changes) {
        for key in self.selected.drain(..) {
            self.contents.insert(key);
            changes.loaded.push(key);
        }
    }
}

impl Policy for Fixed {
    fn start(&mut self, changes: &mut Changes) {
        self.load(changes);
    }

    fn look_up(&mut self, key: Key) -> Access {
        if let Some(training) = &mut self.training {
            training.counts[key as usize] += 1;
            training.left = training.left.saturating_sub(1);
        }
        if self.contents.holds(key) {
            Access::Hit
        } else {
            Access::Bypassed
        }
    }

    fn look_up_again(&mut self, _key: Key) {}

    fn end_batch(&mut self, changes: &mut Changes) {
        if let Some(training) = self.training.take_if(|training| training.left == 0) {
            self.selected = hottest_that_fit(
                self.contents.experts(),
                &training.counts,
                self.contents.budget(),
            );
            self.load(changes);
        }
    }

    fn holds(&self, key: Key) -> bool {
        self.contents.holds(key)
    }

    fn used_bytes(&self) -> u64 {
        self.contents.used()
    }
}
