//! The next look-up of each expert: the input of Belady's algorithm.

use super::Key;

/// The expert is not looked up again.
pub(super) const NEVER: u32 = u32::MAX;

/// For each look-up of a trace, the number of the next look-up of the same expert.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Future {
    next: Vec<u32>,
}

impl Future {
    /// Finds the next look-up of each look-up. `look_ups` are the keys of all look-ups in order, each key once per batch. `n_keys`
    /// is [`Experts::len`](super::Experts::len). Returns `None` for 2^32 - 1 look-ups or more.
    ///
    /// # Panics
    /// If a key is `n_keys` or higher.
    pub fn new(n_keys: usize, look_ups: impl Iterator<Item = Key>) -> Option<Future> {
        let mut last = vec![NEVER; n_keys];
        let mut next = Vec::new();
        for key in look_ups {
            let now = u32::try_from(next.len()).ok().filter(|&now| now < NEVER)?;
            let before = std::mem::replace(&mut last[key as usize], now);
            if before != NEVER {
                next[before as usize] = now;
            }
            next.push(NEVER);
        }
        Some(Future { next })
    }

    /// Number of the next look-up of the expert that look-up `now` accesses, or [`NEVER`].
    pub(super) fn next(&self, now: u32) -> u32 {
        self.next.get(now as usize).copied().unwrap_or(NEVER)
    }
}
