//! What runs a model: this program's executor, or llama.cpp.

pub mod device;
#[cfg(feature = "llama-cpp")]
mod llama_cpp;
pub mod native;
mod scratchpad;

use moe_executor::generate::Decode;
use moe_executor::ops::Observer;
use moe_executor::recorder::Mode;
use moe_gguf::Gguf;
use moe_trace::ops::OpTable;
use moe_trace::{RunWriter, manifest};

use crate::cli::Context;
use device::DeviceArgs;

/// Values of `--engine`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Kind {
    /// The executor of this program
    #[default]
    Native,
    /// llama.cpp, in process
    #[value(name = "llama.cpp")]
    LlamaCpp,
}

/// What an engine says of itself and of the model that it has loaded.
#[derive(Default)]
pub struct About {
    /// Name of the engine.
    pub name: String,
    /// Its version.
    pub version: String,
    /// `general.architecture`.
    pub arch: String,
    /// Layers that it computes; llama.cpp's include the blocks of an MTP head.
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

/// Creates the run once all fallible setup has succeeded; receives the GPU in use, if any.
pub type Begin<'s> = Box<dyn FnOnce(Option<manifest::Gpu>) -> anyhow::Result<RunWriter> + 's>;

/// How a model is to be run.
#[cfg_attr(
    not(feature = "llama-cpp"),
    expect(dead_code, reason = "the executor makes room as it goes")
)]
pub struct Setup<'s> {
    /// Begins the run that records go to.
    pub begin: Option<Begin<'s>>,
    /// Which operations leave records.
    pub mode: Mode,
    /// Told of every routing.
    pub observer: Option<Observer<'s>>,
    /// Positions that a sequence may have.
    pub n_ctx: usize,
    /// Positions that the longest sequence will have: memory need not be there for more.
    pub n_positions: usize,
    /// Tokens of a batch at most.
    pub n_batch: usize,
}

/// A model, loaded.
pub trait Engine {
    /// What it is.
    fn about(&self) -> &About;

    /// Tokens of a text, with those that the vocabulary puts around it.
    fn encode(&self, text: &str) -> anyhow::Result<Vec<u32>>;

    /// The bytes of a token.
    fn piece(&self, token: u32) -> Vec<u8>;

    /// Records that a pass over `n_tokens` leaves at most.
    fn records_per_pass(&self, n_tokens: usize, mode: Mode) -> u64;

    /// Begins a run.
    fn session<'s>(&'s self, setup: Setup<'s>) -> anyhow::Result<Box<dyn Session + 's>>;
}

/// A run of a model.
pub trait Session: Decode {
    /// Tells the observer of nothing more.
    fn stop_observing(&mut self);

    /// The GPU that takes part, as in the manifest; none for the CPU alone.
    fn gpu(&self) -> Option<manifest::Gpu> {
        None
    }

    /// Bytes that the memory with the weights reads in a second, if all of them live on the GPU.
    fn gpu_bandwidth(&self, _ctx: &Context) -> Option<f64> {
        None
    }

    /// What the GPU could not do and the processor did; none if there was nothing.
    fn fallbacks(&self) -> Option<String> {
        None
    }

    /// Ends the run; the writer can then be finished. The second value is what could not be written at the end.
    fn into_writer(self: Box<Self>) -> (Option<RunWriter>, moe_executor::Result<()>);
}

/// Loads a model into an engine, to be computed by `n_threads` threads and by the GPU that `device` asks for.
pub fn load<'g>(
    kind: Kind,
    gguf: &'g Gguf,
    n_threads: usize,
    device: &DeviceArgs,
    ctx: &Context,
) -> anyhow::Result<Box<dyn Engine + 'g>> {
    if kind != Kind::Native && device.device != device::Kind::Cpu {
        anyhow::bail!("--device is for the executor of this program; leave out --engine");
    }
    match kind {
        Kind::Native => Ok(Box::new(native::Native::load(
            gguf,
            n_threads,
            device.clone(),
            *ctx,
        )?)),
        #[cfg(feature = "llama-cpp")]
        Kind::LlamaCpp => Ok(Box::new(llama_cpp::LlamaCpp::load(gguf, n_threads)?)),
        #[cfg(not(feature = "llama-cpp"))]
        Kind::LlamaCpp => anyhow::bail!(
            "this program was built without llama.cpp; build it with `cargo install --path crates/moe-analyze --features llama-cpp` (needs cmake and libclang)"
        ),
    }
}
