//! A trace as a sequence of batches for cache simulation.

use std::sync::Arc;

use moe_placement::cache::{Experts, Future, Key};
use moe_placement::predict::ExternalPredictions;

/// Flag of a selection whose expert was looked up before in the batch.
const AGAIN: u32 = 1 << 31;

/// Flag of a batch that ends a request. The lower bits are the phase.
const ENDS_REQUEST: u8 = 1 << 7;

/// The selections of a trace, divided into batches. Uses 4 bytes per selection and 5 bytes per batch.
#[derive(Debug, Clone)]
pub struct Batches {
    experts: Arc<Experts>,
    /// Keys, possibly with the flag [`AGAIN`].
    selections: Vec<u32>,
    /// `[n_batches]`: end of the batch in `selections`.
    ends: Vec<u32>,
    /// `[n_batches]`: phase, possibly with the flag [`ENDS_REQUEST`].
    flags: Vec<u8>,
    look_ups: u64,
    properties: TraceProperties,
}

/// Properties of a trace in addition to its selections.
#[derive(Debug, Clone)]
pub(super) struct TraceProperties {
    /// `[n_layer]`: mean time from the layer's routing to the next routing, in s.
    pub(super) windows_s: Option<Vec<f64>>,
    /// Experts per token (top-k).
    pub(super) n_expert_used: u32,
}

/// The tokens that one layer routes in one pass.
#[derive(Debug, Clone, Copy)]
pub struct Batch<'a> {
    selections: &'a [u32],
    flags: u8,
}

impl Batch<'_> {
    /// Phase: 0 prompt, 1 generate, 2 unknown.
    pub fn phase(&self) -> usize {
        usize::from(self.flags & !ENDS_REQUEST)
    }

    /// Whether the batch is the last one of a request.
    pub fn ends_request(&self) -> bool {
        self.flags & ENDS_REQUEST != 0
    }

    /// Selected expert of each token and slot, in order, and whether the batch has looked it up before.
    pub fn selections(&self) -> impl Iterator<Item = (Key, bool)> {
        self.selections
            .iter()
            .map(|&selection| (selection & !AGAIN, selection & AGAIN != 0))
    }

    /// Distinct experts in the order of their look-ups.
    pub fn look_ups(&self) -> impl Iterator<Item = Key> {
        let firsts = self.selections().filter(|&(_, again)| !again);
        firsts.map(|(key, _)| key)
    }
}

/// The lookups of the generated tokens of a trace, independent of any cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Workload {
    /// Number of passes, in the layer with the most passes. For a single sequence, it is the number of generated tokens.
    pub tokens: u64,
    /// Number of look-ups.
    pub look_ups: u64,
    /// Bytes of all looked-up experts.
    pub bytes: u64,
}

impl Batches {
    /// Batches of keys of `experts` that end at `ends`. A prompt after generated tokens starts a new request.
    pub(super) fn new(
        experts: Arc<Experts>,
        mut selections: Vec<u32>,
        ends: Vec<u32>,
        mut flags: Vec<u8>,
        properties: TraceProperties,
    ) -> Batches {
        let mut look_ups = 0;
        // `[n_keys]`: number of the batch with the expert's last look-up, from 1.
        let mut last = vec![0u32; experts.len()];
        let mut start = 0;
        for (batch, &end) in (1..).zip(&ends) {
            for selection in &mut selections[start..end as usize] {
                let last = &mut last[*selection as usize];
                if std::mem::replace(last, batch) == batch {
                    *selection |= AGAIN;
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
            selections,
            ends,
            flags,
            look_ups,
            properties,
        }
    }

    /// Time window of each layer (`[n_layer]`) in seconds: the mean time from its routing to the next routing, for generated
    /// tokens. `None` if the trace has no times.
    ///
    /// The window contains the layer's experts and the next layer's attention. After the last layer it contains the output,
    /// sampling, and the next token's layers up to its first routing. Waiting times of the recorded program are included.
    pub fn windows_s(&self) -> Option<&[f64]> {
        self.properties.windows_s.as_deref()
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
                selections: &self.selections[start as usize..end as usize],
                flags,
            })
    }

    /// Number of selections: one per expert and token.
    pub fn n_selections(&self) -> u64 {
        self.selections.len() as u64
    }

    /// Number of batches.
    pub fn n_batches(&self) -> usize {
        self.ends.len()
    }

    /// Number of look-ups: one per distinct expert of each batch.
    pub fn n_look_ups(&self) -> u64 {
        self.look_ups
    }

    /// Number of look-ups of each expert (`[n_keys]`).
    pub fn counts(&self) -> Vec<u64> {
        let mut counts = vec![0; self.experts.len()];
        for key in self.look_ups() {
            counts[key as usize] += 1;
        }
        counts
    }

    /// Fraction of the layer's tokens that select each expert (`[n_keys]`), including prompt tokens.
    pub fn shares(&self) -> Vec<f64> {
        let mut counts = vec![0u64; self.experts.len()];
        for &selection in &self.selections {
            counts[(selection & !AGAIN) as usize] += 1;
        }
        let mut shares = vec![0.0; counts.len()];
        for layer in 0..self.experts.n_layer() {
            let keys = self.experts.keys_of(layer);
            let keys = keys.start as usize..keys.end as usize;
            let selections: u64 = counts[keys.clone()].iter().sum();
            let tokens = selections as f64 / f64::from(self.properties.n_expert_used);
            for (share, &count) in shares[keys.clone()].iter_mut().zip(&counts[keys]) {
                *share = (count as f64 / tokens.max(1.0)).min(1.0);
            }
        }
        shares
    }

    /// Next look-up of each expert, the input of Belady's algorithm; `None` if the trace is too long.
    pub fn future(&self) -> Option<Future> {
        Future::new(self.experts.len(), self.look_ups())
    }

    /// Bytes of the distinct experts of the largest batch.
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

    /// Upper bound of the bytes that a pass of a generated token needs in all layers. An LRU cache with a smaller budget
    /// evicts the experts of a layer before the layer runs again. 0 without generated tokens.
    pub fn cycle_bytes(&self) -> u64 {
        let mut layers = vec![0u64; self.experts.n_layer()];
        for batch in self.generated() {
            if let Some(key) = batch.look_ups().next() {
                let max = &mut layers[self.experts.layer_index(key)];
                *max = self.bytes(&batch).max(*max);
            }
        }
        layers.into_iter().fold(0, u64::saturating_add)
    }

    /// Look-ups and bytes of generated tokens, independent of the cache.
    pub fn workload(&self) -> Workload {
        let mut layers = vec![0u64; self.experts.n_layer()];
        let (mut look_ups, mut bytes) = (0, 0u64);
        for batch in self.generated() {
            look_ups += batch.look_ups().count() as u64;
            bytes = bytes.saturating_add(self.bytes(&batch));
            if let Some(key) = batch.look_ups().next() {
                layers[self.experts.layer_index(key)] += 1;
            }
        }
        Workload {
            tokens: layers.into_iter().max().unwrap_or(0),
            look_ups,
            bytes,
        }
    }

    /// The trace as predictions: the selections of a layer in a pass are the prediction for that pass.
    pub fn to_predictions(&self) -> ExternalPredictions {
        let mut predictions = ExternalPredictions::new(self.experts.n_layer());
        for batch in self.generated() {
            let predicted: Vec<Key> = batch.look_ups().collect();
            if let Some(&key) = predicted.first() {
                predictions.push(self.experts.layer_index(key), predicted);
            }
        }
        predictions
    }

    fn generated(&self) -> impl Iterator<Item = Batch<'_>> {
        self.iter().filter(|batch| batch.phase() == 1)
    }

    fn look_ups(&self) -> impl Iterator<Item = Key> {
        let firsts = self.selections.iter().copied();
        firsts.filter(|selection| selection & AGAIN == 0)
    }
}
