//! Errors of sessions.

/// An error of a concrete engine, or of the callback that creates the run directory.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Errors of all engines, and errors of a concrete engine.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The trace cannot be written.
    #[error(transparent)]
    Trace(#[from] moe_trace::Error),
    /// A result of the model is not finite.
    #[error(
        "{node} at position {position} has values that are not finite; the weights or hyper-parameters of the model or of an adapter are damaged"
    )]
    NotFinite {
        /// The first graph node with such a value.
        node: String,
        /// Position in the sequence.
        position: u32,
    },
    /// There is no first token.
    #[error("the prompt is empty, and the tokenizer adds no BOS token; pass a prompt")]
    EmptyPrompt,
    /// The prompt does not fit the context.
    #[error(
        "the prompt has {tokens} tokens, but the context length is {context} (the model was trained with {trained}); shorten the prompt"
    )]
    ContextFull {
        /// Tokens of the prompt.
        tokens: usize,
        /// Context length.
        context: usize,
        /// Context length of the model's training.
        trained: usize,
    },
    /// A token id outside the vocabulary.
    #[error(
        "token id {token} at position {position} is outside the vocabulary of {n_vocab} tokens; use token ids of this model's vocabulary"
    )]
    TokenOutOfRange {
        /// The id.
        token: u32,
        /// Position in the sequence.
        position: usize,
        /// Size of the vocabulary.
        n_vocab: usize,
    },
    /// An error of a concrete engine.
    #[error(transparent)]
    Engine(BoxError),
}

impl Error {
    /// An error of a concrete engine.
    pub fn engine(error: impl Into<BoxError>) -> Error {
        Error::Engine(error.into())
    }
}

/// Result of an engine.
pub type Result<T, E = Error> = std::result::Result<T, E>;
