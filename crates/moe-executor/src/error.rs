//! Errors and warnings of loading and running a model.

use std::path::PathBuf;

use moe_files::text::counted;
use moe_trace::{ExpertId, LayerId, TokenId};

/// Errors of the executor. Each message names the file and the key or tensor at fault.
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
        /// The fault.
        source: Box<crate::tokenizer::Error>,
    },
    /// A text cannot be tokenized.
    #[error(transparent)]
    Tokenizer(#[from] crate::tokenizer::Error),
    /// A tensor belongs to a layer beyond the number of layers in the hyper-parameters.
    #[error(
        "{file}: tensor `{tensor}` is of a layer beyond the last: `block_count` without MTP blocks is {n_layer}; convert \
         the model again"
    )]
    ExtraLayer {
        /// Model file.
        file: PathBuf,
        /// Tensor name.
        tensor: String,
        /// Layers of the model.
        n_layer: usize,
    },
    /// The architecture is not supported.
    #[error(
        "{file}: architecture `{arch}` is not supported by the native executor (supported: {supported}); run the model \
         with the llama.cpp engine"
    )]
    Architecture {
        /// Model file.
        file: PathBuf,
        /// Value of `general.architecture`.
        arch: String,
        /// The supported architectures.
        supported: String,
    },
    /// A part of the model has no GPU kernel.
    #[error(
        "{file}: this {arch} model has {part}, which run on the CPU only; run the model without a GPU"
    )]
    CpuOnly {
        /// Model file.
        file: PathBuf,
        /// Architecture.
        arch: String,
        /// The part.
        part: &'static str,
    },
    /// A LoRA adapter cannot be used with the model.
    #[error("{file}: {source}")]
    Adapter {
        /// File of the adapter.
        file: PathBuf,
        /// The fault.
        source: Box<crate::adapter::AdapterFault>,
    },
    /// A cache of experts and adapters of expert tensors at the same time.
    #[error(
        "{file}: the LoRA adapter changes experts, and a cache of experts computes them without adapters; run the model without \
         the cache, or without the adapter"
    )]
    AdaptedExperts {
        /// File of the first adapter of expert tensors.
        file: PathBuf,
    },
    /// A hyper-parameter is missing.
    #[error("{file}: required key `{key}` of a {arch} model is missing; convert the model again")]
    MissingKey {
        /// Model file.
        file: PathBuf,
        /// The GGUF key.
        key: String,
        /// Architecture that needs it.
        arch: String,
    },
    /// The model is dense.
    #[error(
        "{file}: the model has no experts: `{key}` is missing or 0; use a mixture-of-experts model"
    )]
    NoExperts {
        /// Model file.
        file: PathBuf,
        /// The GGUF key.
        key: String,
    },
    /// The value of a hyper-parameter is not supported.
    #[error("{file}: key `{key}` is {value}: {reason}")]
    BadKey {
        /// Model file.
        file: PathBuf,
        /// The GGUF key.
        key: String,
        /// Its value.
        value: String,
        /// Why the value is not supported.
        reason: String,
    },
    /// A tensor is missing.
    #[error(
        "{file}: required tensor `{tensor}` of a {arch} model is missing; download or convert the model again"
    )]
    MissingTensor {
        /// Model file.
        file: PathBuf,
        /// Tensor name.
        tensor: String,
        /// Architecture that needs it.
        arch: String,
    },
    /// A tensor that the executor does not use. Ignoring it would change the results.
    #[error(
        "{file}: tensor `{tensor}` is unknown in {arch} models and must not be ignored; run the model with llama.cpp, or \
         convert it again"
    )]
    UnknownTensor {
        /// Model file.
        file: PathBuf,
        /// Tensor name.
        tensor: String,
        /// Architecture that has no such tensor.
        arch: String,
    },
    /// The shape of a tensor does not match the hyper-parameters.
    #[error(
        "{file}: tensor `{tensor}` has shape {found:?}, but the hyper-parameters require {expected:?}; convert the model again"
    )]
    Shape {
        /// Model file.
        file: PathBuf,
        /// Tensor name.
        tensor: String,
        /// Shape in the file, `ne` order.
        found: Vec<u64>,
        /// Required shape, `ne` order.
        expected: Vec<u64>,
    },
    /// The type of a tensor has no kernel.
    #[error("{file}: tensor `{tensor}`: {source}")]
    Kernel {
        /// Model file.
        file: PathBuf,
        /// Tensor name.
        tensor: String,
        /// The type, and the types that have a kernel.
        source: crate::cpu::quant::Error,
    },
    /// The tokens of a layer have different numbers of experts.
    #[error(
        "the token at position {position} has {} in layer {layer}, but the tokens before it have {expected}; a replay needs \
         the same number for all tokens of a layer",
        counted(*.found, "expert")
    )]
    UnevenToken {
        /// Layer.
        layer: LayerId,
        /// Position of the token in its sequence.
        position: TokenId,
        /// Number of its experts.
        found: usize,
        /// Number of experts of the first token in the layer.
        expected: usize,
    },
    /// A trace contains an expert that the model does not have.
    #[error(
        "expert {expert} of the token at position {position} in layer {layer} is out of range (0..={}); the trace is of \
         another model",
        .n_expert.saturating_sub(1)
    )]
    ExpertOutOfRange {
        /// Layer.
        layer: LayerId,
        /// Position of the token in its sequence.
        position: TokenId,
        /// The expert.
        expert: ExpertId,
        /// Experts per layer of the model.
        n_expert: usize,
    },
    /// Heads of the model are not complete blocks of the type of the KV cache.
    #[error(
        "{file}: a KV cache with {what} of type {ty} needs heads of a multiple of {block} elements, but the heads of the model \
         have {head_dim}; use type f16 or f32"
    )]
    CacheType {
        /// Model file.
        file: PathBuf,
        /// `keys` or `values`.
        what: &'static str,
        /// Type of the keys or values.
        ty: crate::kv_cache::CacheType,
        /// Elements of a block.
        block: u64,
        /// Elements of a head.
        head_dim: usize,
    },
    /// Keys and values of the model have one row in the KV cache, and it would have two types.
    #[error(
        "{file}: the KV cache of this model stores keys and values in one row, so keys of type {k} and values of type {v} are \
         not possible; use the same type for both"
    )]
    CacheTypes {
        /// Model file.
        file: PathBuf,
        /// Type of the keys.
        k: crate::kv_cache::CacheType,
        /// Type of the values.
        v: crate::kv_cache::CacheType,
    },
    /// The memory of the KV cache cannot be allocated.
    #[error(
        "the memory of the KV cache cannot be allocated: {n_positions} positions of {} need {bytes} bytes; use a shorter \
         context, fewer sequences, or a cache of a smaller type",
        counted(*.n_seq, "sequence")
    )]
    CacheMemory {
        /// Bytes of keys and values in all layers.
        bytes: u64,
        /// Positions of each sequence.
        n_positions: usize,
        /// Number of sequences.
        n_seq: usize,
    },
    /// The memory of the recurrent states cannot be allocated.
    #[error(
        "the memory of the recurrent states cannot be allocated: {} need {bytes} bytes; use fewer sequences",
        counted(*.n_seq, "sequence")
    )]
    StateMemory {
        /// Bytes of the states of all sequences in all layers.
        bytes: u64,
        /// Number of sequences.
        n_seq: usize,
    },
    /// A sequence with recurrent states cannot keep only the first of its positions.
    #[error(
        "slot {slot} cannot be truncated from {n_past} to {n} positions, because the recurrent states of the model cannot be \
         rewound; truncate it to 0 positions, and evaluate its tokens again"
    )]
    TruncatedState {
        /// The slot.
        slot: usize,
        /// Number of positions of its sequence.
        n_past: usize,
        /// Number of positions to keep.
        n: usize,
    },
    /// The KV cache has no such slot.
    #[error("slot {slot} of the KV cache is out of range (0..={})", .n_slots.saturating_sub(1))]
    SlotOutOfRange {
        /// The slot.
        slot: usize,
        /// Number of slots.
        n_slots: usize,
    },
    /// The position of a token does not follow those before it.
    #[error(
        "the next position of slot {slot} is {expected}, but the batch has a token at position {position}; truncate the slot, \
         or pass the tokens between them"
    )]
    BatchPosition {
        /// The slot.
        slot: usize,
        /// Position of the token.
        position: usize,
        /// Number of positions before the token.
        expected: usize,
    },
    /// A hot cache cannot have the requested contents.
    #[error(transparent)]
    HotCache(#[from] crate::hot_cache::Error),
    /// A dynamic cache cannot have the requested settings.
    #[error(transparent)]
    DynamicCache(#[from] moe_placement::dynamic::Error),
    /// A GPU failed, and the CPU cannot take over because values on the GPU are lost.
    #[error(transparent)]
    Cuda(#[from] crate::cuda::Error),
    /// The threads of the pool cannot be started.
    #[error("cannot start {}: {source}", counted(*.threads, "thread"))]
    Threads {
        /// Requested threads.
        threads: usize,
        /// Error of the operating system.
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

/// A problem of a model file that does not prevent running it.
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
    /// A tensor of an adapter that has no effect.
    #[error(
        "tensor `{tensor}` of the LoRA adapter {adapter} has no effect, as in llama.cpp: adapters cannot change norms"
    )]
    IgnoredAdapterTensor {
        /// File of the adapter.
        adapter: PathBuf,
        /// Tensor name.
        tensor: String,
    },
    /// The vocabulary has a fault that llama.cpp accepts with a warning, too.
    #[error(transparent)]
    Vocabulary(#[from] crate::tokenizer::Warning),
}

/// Result of the executor.
pub type Result<T, E = Error> = std::result::Result<T, E>;
