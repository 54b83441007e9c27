//! What can go wrong while a session runs.

/// An error of a concrete engine, or of the callback that starts a run.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Errors that all engines have in common, and those of one engine.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The trace cannot be written.
    #[error(transparent)]
    Trace(#[from] moe_trace::Error),
    /// The model computes something that is no number.
    #[error(
        "{node} at position {position} has values that are not finite; the weights or hyper-parameters of the model are damaged"
    )]
    NotFinite {
        /// Graph node where it showed.
        node: String,
        /// Position in the sequence.
        position: u32,
    },
    /// There is no token to start from.
    #[error(
        "the prompt is empty, and the model's vocabulary puts no token before it; give a prompt"
    )]
    EmptyPrompt,
    /// The prompt does not fit the context.
    #[error(
        "the prompt has {tokens} tokens, the context has room for {context} (the model was trained with {trained}); shorten the prompt"
    )]
    ContextFull {
        /// Tokens asked for.
        tokens: usize,
        /// Tokens that fit.
        context: usize,
        /// Context length of the model's training.
        trained: usize,
    },
    /// A token id outside the vocabulary.
    #[error(
        "token id {token} at position {position} is outside the vocabulary of {n_vocab} tokens"
    )]
    TokenOutOfRange {
        /// The id.
        token: u32,
        /// Position in the sequence.
        position: usize,
        /// Size of the vocabulary.
        n_vocab: usize,
    },
    /// The engine failed for a reason of its own.
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
