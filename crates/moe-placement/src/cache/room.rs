//! The experts in a cache, their bytes, and which of them the running batch uses.

use std::sync::Arc;

use super::{Changes, Experts, Key};

/// Not in the cache.
const ABSENT: u32 = u32::MAX;

/// A budget of bytes and what is in it.
#[derive(Debug)]
pub struct Room {
    experts: Arc<Experts>,
    budget: u64,
    used: u64,
    held: Vec<Key>,
    /// `[n_keys]`: place in `held`, or [`ABSENT`].
    place: Vec<u32>,
    /// Number of the running batch, from 1.
    batch: u32,
    /// `[n_keys]`: batch of the last look-up, 0 before the first.
    last_batch: Vec<u32>,
}

impl Room {
    /// An empty room.
    pub fn new(experts: Arc<Experts>, budget: u64) -> Room {
        let n = experts.len();
        Room {
            experts,
            budget,
            used: 0,
            held: Vec::new(),
            place: vec![ABSENT; n],
            batch: 1,
            last_batch: vec![0; n],
        }
    }

    /// The experts of the model.
    pub fn experts(&self) -> &Experts {
        &self.experts
    }

    /// Bytes that may be used between batches.
    pub fn budget(&self) -> u64 {
        self.budget
    }

    /// Bytes of what is in the cache.
    pub fn used(&self) -> u64 {
        self.used
    }

    /// What is in the cache, in no order.
    pub fn held(&self) -> &[Key] {
        &self.held
    }

    /// Whether an expert is in the cache.
    pub fn holds(&self, key: Key) -> bool {
        self.place[key as usize] != ABSENT
    }

    /// Whether more is held than may be.
    pub fn is_over(&self) -> bool {
        self.used > self.budget
    }

    /// Whether the running batch uses an expert.
    pub fn is_current(&self, key: Key) -> bool {
        self.last_batch[key as usize] == self.batch
    }

    /// Notes that the running batch uses an expert; tells whether it is there.
    pub fn touch(&mut self, key: Key) -> bool {
        self.last_batch[key as usize] = self.batch;
        self.holds(key)
    }

    /// Puts in an expert that is not there.
    pub fn insert(&mut self, key: Key) {
        let place = u32::try_from(self.held.len()).expect("no more experts than keys");
        self.place[key as usize] = place;
        self.held.push(key);
        self.used = self.used.saturating_add(self.experts.bytes(key));
    }

    /// Takes out an expert that is there.
    pub fn remove(&mut self, key: Key) {
        let place = std::mem::replace(&mut self.place[key as usize], ABSENT);
        self.held.swap_remove(place as usize);
        if let Some(&moved) = self.held.get(place as usize) {
            self.place[moved as usize] = place;
        }
        self.used -= self.experts.bytes(key);
    }

    /// Takes out what `victim` names until the budget is kept or nobody may go; then the next batch runs.
    pub fn end_batch(
        &mut self,
        changes: &mut Changes,
        mut victim: impl FnMut(&Room) -> Option<Key>,
    ) {
        while self.is_over() {
            let Some(key) = victim(self) else { break };
            self.remove(key);
            changes.evicted.push(key);
        }
        self.batch += 1;
    }
}
