//! Traits and types of engines and their sessions.

use moe_placement::perf::PerfMode;
use moe_trace::ops::OpTable;
use moe_trace::{Phase, RunWriter, manifest};

use crate::{BatchSession, BoxError, Observer, Result};

/// Which operations a session records.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Mode {
    /// All operations.
    #[default]
    All,
    /// Expert operations only (`MUL_MAT_ID`, `ADD_ID`).
    Experts,
}

/// For which tokens of a batch logits are computed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Logits {
    /// None, for all batches of a prompt except the last.
    None,
    /// The last token.
    Last,
}

/// Properties of an engine and of its loaded model.
#[derive(Default)]
pub struct EngineInfo {
    /// Name of the engine.
    pub name: String,
    /// Version of the engine.
    pub version: String,
    /// `general.architecture`.
    pub arch: String,
    /// Number of layers that are computed: the blocks without those of an MTP head.
    pub n_layer: usize,
    /// Number of experts in a layer.
    pub n_expert: usize,
    /// Number of selected experts for a token.
    pub n_expert_used: usize,
    /// Number of tokens in the vocabulary.
    pub n_vocab: usize,
    /// Context length of the model's training, in tokens.
    pub n_ctx_train: usize,
    /// Operation numbers in its records.
    pub ops: OpTable,
    /// Flags of the memory mapping of the model's files.
    pub mmap: Vec<String>,
}

/// Properties of a session before its first pass, for the manifest of its run.
#[derive(Default)]
pub struct SessionInfo {
    /// The GPUs that the run uses.
    pub gpus: Vec<manifest::Gpu>,
    /// The KV cache, which is not allocated yet.
    pub kv_cache: Option<manifest::KvCache>,
}

/// Callback that creates the run directory after everything else has succeeded.
pub type CreateRun<'s> = Box<dyn FnOnce(SessionInfo) -> Result<RunWriter, BoxError> + 's>;

/// Settings of a session.
pub struct Setup<'s> {
    /// Callback that creates the run directory; `None` to record nothing.
    pub create_run: Option<CreateRun<'s>>,
    /// Which operations are recorded.
    pub mode: Mode,
    /// Called after the router of each layer.
    pub observer: Option<Observer<'s>>,
    /// Context length: maximum number of positions of a sequence.
    pub n_ctx: usize,
    /// Number of positions of the longest sequence that will be evaluated. The KV cache is allocated for this number.
    pub n_positions: usize,
    /// Maximum number of tokens of a pass (llama.cpp's `n_ubatch`).
    pub n_batch: usize,
    /// Number of sequences that can be evaluated at the same time, at least 1; each has its own positions in the KV cache. More than
    /// one needs [`Session::batches`].
    pub n_sequences: usize,
}

/// A loaded model.
pub trait Engine {
    /// Properties of the engine and the model.
    fn info(&self) -> &EngineInfo;

    /// The tokens of a text, including the special tokens that the vocabulary adds.
    ///
    /// # Errors
    /// The text cannot be tokenized.
    fn encode(&self, text: &str) -> Result<Vec<u32>>;

    /// The bytes of a token.
    fn piece(&self, token: u32) -> Vec<u8>;

    /// Maximum number of records of a pass over `n_tokens` tokens.
    fn records_per_pass(&self, n_tokens: usize, mode: Mode) -> u64;

    /// Starts a session.
    ///
    /// # Errors
    /// The device cannot be used, or the run directory cannot be created.
    fn session<'s>(&'s self, setup: Setup<'s>) -> Result<Box<dyn Session + 's>>;
}

/// Evaluates tokens. Sequences are evaluated one after another; each starts with an empty KV cache.
pub trait Decode {
    /// Starts a new sequence with an empty KV cache. `sequence_id` is stored in records.
    fn begin_sequence(&mut self, sequence_id: u32);

    /// Number of positions evaluated so far in this sequence.
    fn n_past(&self) -> usize;

    /// Context length: maximum number of positions of a sequence.
    fn n_ctx(&self) -> usize;

    /// Context length of the model's training, in tokens.
    fn n_ctx_train(&self) -> usize;

    /// Whether a token is an end-of-generation token.
    fn is_eog(&self, token: u32) -> bool;

    /// Whether the trace limit allows another pass over `n_tokens` tokens.
    fn has_room(&self, n_tokens: usize) -> bool;

    /// Evaluates `tokens` of one phase as one batch. Returns the logits `(n_vocab)` of the last token if requested.
    ///
    /// # Errors
    /// A token is outside the vocabulary, the context is full, results are not finite, or the trace cannot be written.
    fn decode(&mut self, tokens: &[u32], phase: Phase, logits: Logits) -> Result<&[f32]>;
}

/// A session: evaluates tokens and records them.
pub trait Session: Decode {
    /// Drops the observer: it is not called in the following passes.
    fn stop_observing(&mut self);

    /// The interface for passes over tokens of several sequences; `None` if the engine evaluates one sequence at a time.
    fn batches(&mut self) -> Option<&mut dyn BatchSession> {
        None
    }

    /// Selects what the trace gets from the next pass on; `None` pauses recording. Waits until the files contain everything so far.
    /// Only sessions whose [`Setup`] creates a run have a trace. Has no effect if the engine cannot change it.
    ///
    /// # Errors
    /// A write failed.
    fn set_trace(&mut self, mode: Option<Mode>) -> Result<()> {
        let _ = mode;
        Ok(())
    }

    /// The GPUs that the session uses, for the manifest, in the order of the device list.
    fn gpus(&self) -> Vec<manifest::Gpu> {
        Vec::new()
    }

    /// Measures the memory bandwidth of the first GPU in bytes per second; `None` without a GPU.
    fn gpu_bandwidth(&self) -> Option<Result<f64>> {
        None
    }

    /// Fraction of the expert slots so far that hot lanes of a hot expert cache computed, 0.0 to 1.0; `None` without a cache or
    /// without counts. Ends the sequence.
    fn hit_rate(&mut self) -> Option<f64> {
        None
    }

    /// Changes what the hot expert cache counts from the next sequence on. Ends the sequence. Has no effect without a cache.
    fn set_perf_mode(&mut self, mode: PerfMode) {
        let _ = mode;
    }

    /// Ends the session and returns the writer, whose `finish` completes the run, and the result of the last writes.
    fn into_writer(self: Box<Self>) -> (Option<RunWriter>, Result<()>);
}
