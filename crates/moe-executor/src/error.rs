//! What can go wrong while a model is loaded or run.

use std::path::PathBuf;

use moe_gguf::LayerId;
use moe_gguf::text::counted;

/// Errors of the executor. Each names the file, key or tensor at fault and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The GGUF file cannot be read.
    #[error(transparent)]
    Gguf(#[from] moe_gguf::Error),
    /// The trace cannot be written.
    #[error(transparent)]
    Trace(#[from] moe_trace::Error),
    /// The vocabulary cannot be used.
    #[error("{file}: {source}")]
    Vocabulary {
        /// Model file.
        file: PathBuf,
        /// What is wrong with it.
        source: Box<crate::tokenizer::Error>,
    },
    /// A text cannot be turned into tokens.
    #[error(transparent)]
    Tokenizer(#[from] crate::tokenizer::Error),
    /// A tensor of a layer that the hyper-parameters do not have.
    #[error(
        "{file}: tensor `{tensor}` belongs to no layer: the model has {n_layer} (`block_count`)"
    )]
    ExtraLayer {
        /// Model file.
        file: PathBuf,
        /// Tensor name.
        tensor: String,
        /// Layers of the model.
        n_layer: usize,
    },
    /// No executor for this architecture.
    #[error("{file}: architecture `{arch}` is not supported; this executor runs {supported}")]
    Architecture {
        /// Model file.
        file: PathBuf,
        /// Value of `general.architecture`.
        arch: String,
        /// The architectures that can be run.
        supported: String,
    },
    /// A hyper-parameter is missing.
    #[error("{file}: key `{key}` is missing; the file is not a complete {arch} model")]
    MissingKey {
        /// Model file.
        file: PathBuf,
        /// The GGUF key.
        key: String,
        /// Architecture that needs it.
        arch: String,
    },
    /// A hyper-parameter has a value that cannot be run.
    #[error("{file}: key `{key}` is {value}: {reason}")]
    BadKey {
        /// Model file.
        file: PathBuf,
        /// The GGUF key.
        key: String,
        /// Its value.
        value: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A tensor is missing.
    #[error("{file}: tensor `{tensor}` is missing; the file is not a complete {arch} model")]
    MissingTensor {
        /// Model file.
        file: PathBuf,
        /// Tensor name.
        tensor: String,
        /// Architecture that needs it.
        arch: String,
    },
    /// A tensor that the executor would leave out.
    #[error(
        "{file}: tensor `{tensor}` is not known in {arch} models, and without it the model would be another; record it with llama.cpp, or convert it again"
    )]
    UnknownTensor {
        /// Model file.
        file: PathBuf,
        /// Tensor name.
        tensor: String,
        /// Architecture that has no such tensor.
        arch: String,
    },
    /// A tensor has another shape than the hyper-parameters ask for.
    #[error(
        "{file}: tensor `{tensor}` has shape {found:?}, the hyper-parameters ask for {expected:?}"
    )]
    Shape {
        /// Model file.
        file: PathBuf,
        /// Tensor name.
        tensor: String,
        /// Shape in the file, `ne` order.
        found: Vec<u64>,
        /// Shape wanted, `ne` order.
        expected: Vec<u64>,
    },
    /// No kernel for the type of a tensor.
    #[error("{file}: tensor `{tensor}`: {source}")]
    Kernel {
        /// Model file.
        file: PathBuf,
        /// Tensor name.
        tensor: String,
        /// The type at fault, and those that work.
        source: crate::cpu::quant::Error,
    },
    /// A token of a trace has another number of experts than those before it.
    #[error(
        "the token at position {position} has {} in layer {layer}, the tokens before it have {expected}; every token of a layer must \
         have as many to be replayed",
        counted(*.found, "expert")
    )]
    UnevenToken {
        /// Layer.
        layer: LayerId,
        /// Position of the token in its sequence.
        position: u32,
        /// Its experts.
        found: usize,
        /// Experts of the first token in the layer.
        expected: usize,
    },
    /// An expert that the model does not have.
    #[error(
        "expert {expert} of the token at position {position} in layer {layer}: the model has {n_expert}; the trace is of another \
         model"
    )]
    ExpertOutOfRange {
        /// Layer.
        layer: LayerId,
        /// Position of the token in its sequence.
        position: u32,
        /// The expert.
        expert: i32,
        /// Experts of a layer.
        n_expert: usize,
    },
    /// The GPU failed where the host cannot take over.
    #[error(transparent)]
    Cuda(#[from] crate::cuda::Error),
    /// The thread pool could not be started.
    #[error("cannot start {}: {source}", counted(*.threads, "thread"))]
    Threads {
        /// Threads asked for.
        threads: usize,
        /// The system's reason.
        source: std::io::Error,
    },
}

impl From<Error> for moe_engine::Error {
    fn from(error: Error) -> moe_engine::Error {
        match error {
            Error::Trace(error) => error.into(),
            error => moe_engine::Error::engine(error),
        }
    }
}

/// Something in a model's file that does not keep it from being run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Warning {
    /// A key that has no effect.
    #[error("key `{key}` has no effect in {arch} models, as in llama.cpp")]
    IgnoredKey {
        /// The GGUF key.
        key: String,
        /// Architecture.
        arch: String,
    },
    /// The vocabulary has a fault that llama.cpp warns of, too.
    #[error(transparent)]
    Vocabulary(#[from] crate::tokenizer::Warning),
}

/// Result of the executor.
pub type Result<T, E = Error> = std::result::Result<T, E>;
