//! Sessions that evaluate several sequences in one pass: the interface of continuous batching.

use moe_placement::learn::LearnFile;
use moe_placement::perf::{PerfMode, SharedCounters};
use moe_trace::Phase;

use crate::{Observer, Result};

/// A token of a pass.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BatchEntry {
    /// The slot of its sequence.
    pub slot: usize,
    /// Token id.
    pub token: u32,
    /// Its position: the number of tokens before it in its sequence.
    pub position: usize,
    /// Phase, for records and counts.
    pub phase: Phase,
    /// Whether its logits are wanted.
    pub logits: bool,
}

/// An update of a hot cache.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct CacheUpdate {
    /// Fraction of the cached experts that the update may exchange, 0.0 to 1.0.
    pub update_rate: f64,
    /// Number of exchanged experts.
    pub exchanged: usize,
    /// Number of exchanges that would make the cache the best one for the file.
    pub candidates: usize,
    /// Number of exchanges that the update rate allows.
    pub max_exchange: usize,
    /// Number of cached experts in layers that the file observes.
    pub hot_experts: usize,
    /// Number of layers with an exchange.
    pub layers_changed: usize,
}

/// A session with a slot for each sequence that is evaluated at the same time. A pass may contain tokens of several sequences and
/// of both phases: for example, a chunk of one prompt and a generated token of each of the other sequences.
pub trait BatchSession {
    /// Number of slots.
    fn n_slots(&self) -> usize;

    /// Context length: maximum number of positions of a sequence.
    fn n_ctx(&self) -> usize;

    /// Number of tokens in the vocabulary.
    fn n_vocab(&self) -> usize;

    /// Whether a token is an end-of-generation token.
    fn is_eog(&self, token: u32) -> bool;

    /// Number of positions of a slot's sequence.
    ///
    /// # Errors
    /// The slot does not exist.
    fn slot_len(&self, slot: usize) -> Result<usize>;

    /// Starts a new sequence with no positions in a slot. `sequence_id` is stored in records and passed to the observer.
    ///
    /// # Errors
    /// The slot does not exist.
    fn begin_slot(&mut self, slot: usize, sequence_id: u32) -> Result<()>;

    /// Removes the positions of a slot's sequence from `n_past` on, so that another continuation can reuse the positions before
    /// it.
    ///
    /// # Errors
    /// The slot does not exist, or the model has recurrent states and `n_past` is neither 0 nor at least the number of positions.
    fn truncate_slot(&mut self, slot: usize, n_past: usize) -> Result<()>;

    /// Evaluates tokens of several sequences in one pass. The tokens of a slot are consecutive positions that follow those in the
    /// cache. Returns the logits `(wanted, n_vocab)` of the entries whose logits are wanted, in their order.
    ///
    /// After an error, the number of positions of the slots in `entries` is undefined; truncate them.
    ///
    /// # Errors
    /// A slot or token is out of range, a position does not follow the previous ones, the context is full, results are not finite,
    /// a device failed and its values are lost, or the trace cannot be written.
    fn decode_batch(&mut self, entries: &[BatchEntry]) -> Result<&[f32]>;

    /// Replaces the observer of the routing; `None` removes it. It is called for each layer when a pass has ended, without router
    /// logits.
    fn set_observer(&mut self, observer: Option<Observer<'static>>);

    /// Updates the expert cache by the activations since the last update. Called between two passes after the end of a request.
    /// Other sequences may be in the middle of their generation; their next pass uses the new contents. Returns the number of
    /// exchanged experts.
    fn between_requests(&mut self) -> usize {
        0
    }

    /// Exchanges experts of the hot cache for those that `learn` ranks highest, without the limit of the update rate. `None` without
    /// a hot cache.
    ///
    /// # Errors
    /// The file does not fit to the model.
    fn update_cache(&mut self, learn: &LearnFile) -> Option<Result<CacheUpdate>> {
        let _ = learn;
        None
    }

    /// The counters of the expert cache, which other threads may read; `None` without a cache.
    fn counters(&self) -> Option<SharedCounters> {
        None
    }

    /// Changes what the expert cache counts. Has no effect without a cache.
    fn set_perf_mode(&mut self, mode: PerfMode) {
        if let Some(counters) = self.counters() {
            counters.lock().set_mode(mode);
        }
    }
}
