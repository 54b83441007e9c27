//! Contents of a cache: resident experts, their total size, and the experts of the current batch.

use std::sync::Arc;

use super::{Changes, Experts, Key};

/// Position of experts that are not resident.
const ABSENT: u32 = u32::MAX;

/// Resident experts and a budget in bytes.
#[derive(Debug)]
pub struct Contents {
    experts: Arc<Experts>,
    budget: u64,
    used: u64,
    held: Vec<Key>,
    /// `[n_keys]`: index in `held`, or [`ABSENT`].
    place: Vec<u32>,
    /// Number of the current batch, from 1.
    batch: u32,
    /// `[n_keys]`: number of the batch with the last look-up; 0 before the first look-up.
    last_batch: Vec<u32>,
}

impl Contents {
    /// An empty cache.
    pub fn new(experts: Arc<Experts>, budget: u64) -> Contents {
        let n = experts.len();
        Contents {
            experts,
            budget,
            used: 0,
            held: Vec::new(),
            place: vec![ABSENT; n],
            batch: 1,
            last_batch: vec![0; n],
        }
    }

    /// All experts of the model.
    pub fn experts(&self) -> &Experts {
        &self.experts
    }

    /// Budget in bytes, which is met between batches.
    pub fn budget(&self) -> u64 {
        self.budget
    }

    /// Total size of the resident experts in bytes.
    pub fn used(&self) -> u64 {
        self.used
    }

    /// Resident experts in arbitrary order.
    pub fn held(&self) -> &[Key] {
        &self.held
    }

    /// Whether an expert is resident.
    pub fn holds(&self, key: Key) -> bool {
        self.place[key as usize] != ABSENT
    }

    /// Whether the resident experts exceed the budget.
    pub fn is_over(&self) -> bool {
        self.used > self.budget
    }

    /// Whether an expert is in the current batch.
    pub fn is_current(&self, key: Key) -> bool {
        self.last_batch[key as usize] == self.batch
    }

    /// Adds an expert to the current batch; returns whether it is resident.
    pub fn touch(&mut self, key: Key) -> bool {
        self.last_batch[key as usize] = self.batch;
        self.holds(key)
    }

    /// Adds an expert that is not resident.
    pub fn insert(&mut self, key: Key) {
        let place = u32::try_from(self.held.len()).expect("keys are 32-bit integers");
        self.place[key as usize] = place;
        self.held.push(key);
        self.used = self.used.saturating_add(self.experts.bytes(key));
    }

    /// Removes a resident expert.
    pub fn remove(&mut self, key: Key) {
        let place = std::mem::replace(&mut self.place[key as usize], ABSENT);
        self.held.swap_remove(place as usize);
        if let Some(&moved) = self.held.get(place as usize) {
            self.place[moved as usize] = place;
        }
        self.used -= self.experts.bytes(key);
    }

    /// Evicts what `victim` returns until the budget is met or `victim` returns `None`, then starts the next batch.
    pub fn end_batch(
        &mut self,
        changes: &mut Changes,
        mut victim: impl FnMut(&Contents) -> Option<Key>,
    ) {
        while self.is_over() {
            let Some(key) = victim(self) else { break };
            self.remove(key);
            changes.evicted.push(key);
        }
        self.batch += 1;
    }
}
