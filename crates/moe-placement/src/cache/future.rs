//! When each look-up's expert is looked up next: what Belady's policy knows.

use super::Key;

/// Never again.
pub(super) const NEVER: u32 = u32::MAX;

/// For each look-up of a trace, in order, the number of the next look-up of its expert.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Future {
    next: Vec<u32>,
}

impl Future {
    /// From the experts that are looked up, in order, each once in its batch; keys are below `n_keys`. Nothing for more
    /// look-ups than 32 bits number.
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

    /// The look-up after the one numbered `now`; [`NEVER`] if there is none.
    pub(super) fn next(&self, now: u32) -> u32 {
        self.next.get(now as usize).copied().unwrap_or(NEVER)
    }
}
