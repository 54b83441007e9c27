//! A trace as the caches see it.

use std::sync::Arc;

use moe_placement::cache::{Experts, Future, Key};
use moe_placement::predict::Given;

/// Marks a choice of an expert that the batch looked up before.
const AGAIN: u32 = 1 << 31;

/// Set in the flags of a batch that ends a request; below it is the phase.
const ENDS_REQUEST: u8 = 1 << 7;

/// The choices of a trace in order, cut into batches: 4 bytes a choice and 5 a batch.
#[derive(Debug, Clone)]
pub struct Batches {
    experts: Arc<Experts>,
    /// Keys, perhaps with [`AGAIN`].
    choices: Vec<u32>,
    /// `[n_batches]`: end in `choices`.
    ends: Vec<u32>,
    /// `[n_batches]`
    flags: Vec<u8>,
    look_ups: u64,
    facts: TraceFacts,
}

/// What a trace tells beside its choices.
#[derive(Debug, Clone)]
pub(super) struct TraceFacts {
    /// `[n_layer]`: time from a layer's routing to the next one.
    pub(super) windows_s: Option<Vec<f64>>,
    /// Experts that a token chooses in a layer.
    pub(super) n_expert_used: u32,
}

/// What one layer routes in one pass.
#[derive(Debug, Clone, Copy)]
pub struct Batch<'a> {
    choices: &'a [u32],
    flags: u8,
}

impl Batch<'_> {
    /// Index of the phase: 0 prompt, 1 generate, 2 not told.
    pub fn phase(&self) -> usize {
        usize::from(self.flags & !ENDS_REQUEST)
    }

    /// Whether it is the last one of a request.
    pub fn ends_request(&self) -> bool {
        self.flags & ENDS_REQUEST != 0
    }

    /// The expert of each token and slot, in order, and whether the batch chose it before.
    pub fn choices(&self) -> impl Iterator<Item = (Key, bool)> {
        self.choices
            .iter()
            .map(|&choice| (choice & !AGAIN, choice & AGAIN != 0))
    }

    /// The distinct experts, in the order in which they are looked up.
    pub fn look_ups(&self) -> impl Iterator<Item = Key> {
        let firsts = self.choices().filter(|&(_, again)| !again);
        firsts.map(|(key, _)| key)
    }
}

/// What the generated tokens of a trace need.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Needs {
    /// Passes: as many as the layer has that routed most often. For one sequence, its tokens.
    pub tokens: u64,
    /// Look-ups.
    pub look_ups: u64,
    /// Bytes of all look-ups.
    pub bytes: u64,
}

impl Batches {
    /// Of keys of `experts`, cut at `ends`; a prompt after generated tokens begins a request.
    pub(super) fn new(
        experts: Arc<Experts>,
        mut choices: Vec<u32>,
        ends: Vec<u32>,
        mut flags: Vec<u8>,
        facts: TraceFacts,
    ) -> Batches {
        let mut look_ups = 0;
        // Number of the batch that looked an expert up last, from 1.
        let mut last = vec![0u32; experts.len()];
        let mut start = 0;
        for (batch, &end) in (1..).zip(&ends) {
            for choice in &mut choices[start..end as usize] {
                let last = &mut last[*choice as usize];
                if std::mem::replace(last, batch) == batch {
                    *choice |= AGAIN;
                } else {
                    look_ups += 1;
                }
            }
            start = end as usize;
        }
        for batch in 1..=flags.len() {
            if flags
                .get(batch)
                .is_none_or(|&next| next == 0 && flags[batch - 1] == 1)
            {
                flags[batch - 1] |= ENDS_REQUEST;
            }
        }
        Batches {
            experts,
            choices,
            ends,
            flags,
            look_ups,
            facts,
        }
    }

    /// How long each layer works until the next one routes (`[n_layer]`, seconds), on average over generated tokens; `None`
    /// where the trace tells no times.
    ///
    /// A layer's window is the time from its routing to the routing that follows: its experts, the next layer's attention,
    /// and after the last layer the output, the sampling and the next token's way to its first routing. What the recorded
    /// program waited for is in it.
    pub fn windows_s(&self) -> Option<&[f64]> {
        self.facts.windows_s.as_deref()
    }

    /// The experts of the model.
    pub fn experts(&self) -> &Arc<Experts> {
        &self.experts
    }

    /// The batches in order.
    pub fn iter(&self) -> impl Iterator<Item = Batch<'_>> {
        let starts = std::iter::once(0).chain(self.ends.iter().copied());
        let ranges = starts.zip(&self.ends);
        ranges
            .zip(&self.flags)
            .map(|((start, &end), &flags)| Batch {
                choices: &self.choices[start as usize..end as usize],
                flags,
            })
    }

    /// Number of choices: each expert of each token.
    pub fn n_choices(&self) -> u64 {
        self.choices.len() as u64
    }

    /// Number of batches.
    pub fn n_batches(&self) -> usize {
        self.ends.len()
    }

    /// Number of look-ups: each distinct expert of each batch.
    pub fn n_look_ups(&self) -> u64 {
        self.look_ups
    }

    /// How often each expert is looked up (`[n_keys]`).
    pub fn counts(&self) -> Vec<u64> {
        let mut counts = vec![0; self.experts.len()];
        for key in self.look_ups() {
            counts[key as usize] += 1;
        }
        counts
    }

    /// The share of its layer's tokens that chose each expert (`[n_keys]`), prompts included.
    pub fn shares(&self) -> Vec<f64> {
        let mut counts = vec![0u64; self.experts.len()];
        for &choice in &self.choices {
            counts[(choice & !AGAIN) as usize] += 1;
        }
        let mut shares = vec![0.0; counts.len()];
        for layer in 0..self.experts.n_layer() {
            let keys = self.experts.keys_of(layer);
            let keys = keys.start as usize..keys.end as usize;
            let choices: u64 = counts[keys.clone()].iter().sum();
            let tokens = choices as f64 / f64::from(self.facts.n_expert_used);
            for (share, &count) in shares[keys.clone()].iter_mut().zip(&counts[keys]) {
                *share = (count as f64 / tokens.max(1.0)).min(1.0);
            }
        }
        shares
    }

    /// When each expert is looked up next.
    pub fn future(&self) -> Option<Future> {
        Future::new(self.experts.len(), self.look_ups())
    }

    /// Bytes of the experts of the batch that has most.
    pub fn largest_batch_bytes(&self) -> u64 {
        self.iter()
            .map(|batch| self.bytes(&batch))
            .max()
            .unwrap_or(0)
    }

    fn bytes(&self, batch: &Batch) -> u64 {
        let bytes = batch.look_ups().map(|key| self.experts.bytes(key));
        bytes.fold(0, u64::saturating_add)
    }

    /// Bytes that one pass of a generated token needs in all layers, at most: a cache that goes by the last use and holds
    /// less has forgotten an expert before its layer comes again. 0 without generated tokens.
    pub fn cycle_bytes(&self) -> u64 {
        let mut layers = vec![0u64; self.experts.n_layer()];
        for batch in self.generated() {
            if let Some(key) = batch.look_ups().next() {
                let most = &mut layers[self.experts.layer_index(key)];
                *most = self.bytes(&batch).max(*most);
            }
        }
        layers.into_iter().fold(0, u64::saturating_add)
    }

    /// What generated tokens need, whatever is cached.
    pub fn needs(&self) -> Needs {
        let mut layers = vec![0u64; self.experts.n_layer()];
        let (mut look_ups, mut bytes) = (0, 0u64);
        for batch in self.generated() {
            look_ups += batch.look_ups().count() as u64;
            bytes = bytes.saturating_add(self.bytes(&batch));
            if let Some(key) = batch.look_ups().next() {
                layers[self.experts.layer_index(key)] += 1;
            }
        }
        Needs {
            tokens: layers.into_iter().max().unwrap_or(0),
            look_ups,
            bytes,
        }
    }

    /// The trace as predictions: what it says a layer chooses in a pass is what is predicted for that pass.
    pub fn as_predictions(&self) -> Given {
        let mut given = Given::new(self.experts.n_layer());
        for batch in self.generated() {
            let predicted: Vec<Key> = batch.look_ups().collect();
            if let Some(&key) = predicted.first() {
                given.push(self.experts.layer_index(key), predicted);
            }
        }
        given
    }

    fn generated(&self) -> impl Iterator<Item = Batch<'_>> {
        self.iter().filter(|batch| batch.phase() == 1)
    }

    fn look_ups(&self) -> impl Iterator<Item = Key> {
        let firsts = self.choices.iter().copied();
        firsts.filter(|choice| choice & AGAIN == 0)
    }
}
