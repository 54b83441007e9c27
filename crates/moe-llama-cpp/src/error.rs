//! What can go wrong in llama.cpp.

use std::path::PathBuf;

use moe_gguf::text::counted;

/// Errors of llama.cpp. Each is one line.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A path that cannot be handed over.
    #[error("{path}: llama.cpp opens paths in UTF-8 without NUL bytes; rename the file")]
    Path {
        /// The path.
        path: PathBuf,
    },
    /// The model cannot be loaded.
    #[error("{path}: llama.cpp cannot load the model: {reason}")]
    Load {
        /// The model's file.
        path: PathBuf,
        /// What llama.cpp logged.
        reason: String,
    },
    /// A value in the header on which llama.cpp would abort the process.
    #[error(
        "{path}: `{key}` is {value}: {reason}; the file is damaged, or was converted for another program: convert the model again"
    )]
    Header {
        /// The model's file.
        path: PathBuf,
        /// The GGUF key.
        key: String,
        /// Its value, or what llama.cpp uses where the key is missing.
        value: String,
        /// What llama.cpp needs.
        reason: String,
    },
    /// A model that is no decoder alone.
    #[error("{path}: the model has an encoder, and only decoders can be recorded")]
    Encoder {
        /// The model's file.
        path: PathBuf,
    },
    /// There is no memory for the context, or the model cannot be run with it.
    #[error("llama.cpp cannot make a context of {n_ctx} positions: {reason}")]
    Context {
        /// Positions asked for.
        n_ctx: u32,
        /// What llama.cpp logged.
        reason: String,
    },
    /// A text that cannot be cut into tokens.
    #[error("llama.cpp cannot cut a text of {bytes} bytes into tokens")]
    Tokenize {
        /// Its length.
        bytes: usize,
    },
    /// More tokens at once than the context was made for.
    #[error("{n_tokens} tokens in a batch, the context was made for {n_batch}")]
    Batch {
        /// Tokens.
        n_tokens: usize,
        /// Tokens that fit.
        n_batch: usize,
    },
    /// A token that the model does not have.
    #[error("token id {token} is outside the vocabulary of {n_vocab} tokens")]
    Token {
        /// The id.
        token: u32,
        /// Size of the vocabulary.
        n_vocab: usize,
    },
    /// A batch cannot be evaluated.
    #[error(
        "llama.cpp cannot evaluate {} from position {position} (code {code}): {reason}",
        counted(*.n_tokens, "token")
    )]
    Decode {
        /// Tokens of the batch.
        n_tokens: usize,
        /// Position of the first.
        position: usize,
        /// What `llama_decode` returned.
        code: i32,
        /// What llama.cpp logged.
        reason: String,
    },
}

/// Result of llama.cpp.
pub type Result<T, E = Error> = std::result::Result<T, E>;
