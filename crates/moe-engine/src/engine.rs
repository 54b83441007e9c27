//! Engines, and sessions of a model in them.

use moe_trace::ops::OpTable;
use moe_trace::{Phase, RunWriter, manifest};

use crate::{BoxError, Observer, Result};

/// Which operations leave records.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Mode {
    /// All of them.
    #[default]
    All,
    /// The expert operations alone (`MUL_MAT_ID`, `ADD_ID`).
    Experts,
}

/// Which tokens of a batch get logits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Logits {
    /// None: an earlier batch of a prompt.
    None,
    /// The last token's.
    Last,
}

/// What an engine reports of itself and of the model that it has loaded.
#[derive(Default)]
pub struct EngineInfo {
    /// Name of the engine.
    pub name: String,
    /// Its version.
    pub version: String,
    /// `general.architecture`.
    pub arch: String,
    /// Layers that it computes: the blocks without those of an MTP head.
    pub n_layer: usize,
    /// Experts in a layer.
    pub n_expert: usize,
    /// Experts that a token is routed to.
    pub n_expert_used: usize,
    /// Tokens of the vocabulary.
    pub n_vocab: usize,
    /// Context length of the training.
    pub n_ctx_train: usize,
    /// Operation numbers of its records.
    pub ops: OpTable,
    /// Flags with which it maps a model's file.
    pub mmap: Vec<String>,
}

/// Starts the run directory once everything else is ready, with the GPUs that take part.
pub type Begin<'s> = Box<dyn FnOnce(Vec<manifest::Gpu>) -> Result<RunWriter, BoxError> + 's>;

/// How a model is to be run.
pub struct Setup<'s> {
    /// Starts the run that records go to; `None` records nothing.
    pub begin: Option<Begin<'s>>,
    /// Which operations leave records.
    pub mode: Mode,
    /// Called after every router.
    pub observer: Option<Observer<'s>>,
    /// Positions that a sequence may have.
    pub n_ctx: usize,
    /// Positions that the longest sequence will have: no memory is needed for more.
    pub n_positions: usize,
    /// Tokens of a batch at most.
    pub n_batch: usize,
}

/// A loaded model.
pub trait Engine {
    /// Name, version and properties of the model.
    fn info(&self) -> &EngineInfo;

    /// Tokens of a text, with those that the vocabulary puts around it.
    ///
    /// # Errors
    /// The text cannot be tokenized.
    fn encode(&self, text: &str) -> Result<Vec<u32>>;

    /// The bytes of a token.
    fn piece(&self, token: u32) -> Vec<u8>;

    /// Records that a pass over `n_tokens` leaves at most.
    fn records_per_pass(&self, n_tokens: usize, mode: Mode) -> u64;

    /// Starts a session.
    ///
    /// # Errors
    /// The device cannot be used, or the run cannot be started.
    fn session<'s>(&'s self, setup: Setup<'s>) -> Result<Box<dyn Session + 's>>;
}

/// Evaluates tokens. Sequences follow one another, each starts with an empty cache.
pub trait Decode {
    /// Starts a new sequence.
    fn begin_sequence(&mut self, sequence_id: u32);

    /// Positions evaluated so far in this sequence.
    fn n_past(&self) -> usize;

    /// Positions that a sequence may have.
    fn n_ctx(&self) -> usize;

    /// Context length of the model's training.
    fn n_ctx_train(&self) -> usize;

    /// Whether a token ends a text.
    fn is_eog(&self, token: u32) -> bool;

    /// Whether the trace has room for a pass over `n_tokens`.
    fn has_room(&self, n_tokens: usize) -> bool;

    /// Evaluates `tokens`, which are of one phase, as one batch and returns the logits `(n_vocab)` of the last, if wanted.
    ///
    /// # Errors
    /// A token outside the vocabulary, a full context, results that are not finite, or a trace that cannot be written.
    fn decode(&mut self, tokens: &[u32], phase: Phase, logits: Logits) -> Result<&[f32]>;
}

/// A run of a model.
pub trait Session: Decode {
    /// Drops the observer.
    fn stop_observing(&mut self);

    /// The GPUs that take part, as the manifest describes them, in the order of the list of devices.
    fn gpus(&self) -> Vec<manifest::Gpu> {
        Vec::new()
    }

    /// Bytes per second that the memory of the first GPU moves, measured now; `None` without a GPU.
    fn gpu_bandwidth(&self) -> Option<Result<f64>> {
        None
    }

    /// Ends the run; the writer can then be finished. The second value is what could not be written at the end.
    fn into_writer(self: Box<Self>) -> (Option<RunWriter>, Result<()>);
}
