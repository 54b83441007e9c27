//! Errors of llama.cpp.

use std::path::PathBuf;

use moe_files::text::counted;

/// Errors of llama.cpp. Each message is one line.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A path that llama.cpp cannot open.
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
        /// The errors that llama.cpp logged.
        reason: String,
    },
    /// A LoRA adapter cannot be loaded.
    #[error("{path}: llama.cpp cannot load the adapter: {reason}")]
    Adapter {
        /// The adapter's file.
        path: PathBuf,
        /// The errors that llama.cpp logged.
        reason: String,
    },
    /// A header value that would make llama.cpp abort the process.
    #[error(
        "{path}: `{key}` is {value}: {reason}; the file is damaged, or was converted for another program: convert the model again"
    )]
    Header {
        /// The model's file.
        path: PathBuf,
        /// The GGUF key.
        key: String,
        /// Its value, or llama.cpp's default if the key is missing.
        value: String,
        /// The requirement of llama.cpp.
        reason: String,
    },
    /// A model with an encoder.
    #[error("{path}: the model has an encoder, but only decoder models can be recorded")]
    Encoder {
        /// The model's file.
        path: PathBuf,
    },
    /// There is not enough memory for the context, or the model does not support its parameters.
    #[error("llama.cpp cannot create a context of {n_ctx} positions: {reason}")]
    Context {
        /// Requested number of positions.
        n_ctx: u32,
        /// The errors that llama.cpp logged.
        reason: String,
    },
    /// A text that cannot be tokenized.
    #[error("llama.cpp cannot tokenize a text of {bytes} bytes")]
    Tokenize {
        /// Length of the text in bytes.
        bytes: usize,
    },
    /// The file has no vocabulary.
    #[error(
        "the model file has no vocabulary (tokenizer.ggml.model is `none`); use token ids instead of text"
    )]
    NoVocabulary,
    /// A character that the vocabulary cannot encode.
    #[error(
        "llama.cpp cannot tokenize the character {character:?}: the vocabulary has no token for it, nor for each of its bytes; \
         convert the model again"
    )]
    NoToken {
        /// The character.
        character: char,
    },
    /// More tokens in a batch than the context allows.
    #[error("the batch has {n_tokens} tokens, but the context was created for at most {n_batch}")]
    Batch {
        /// Tokens of the batch.
        n_tokens: usize,
        /// Maximum number of tokens of a batch.
        n_batch: usize,
    },
    /// A token id outside the vocabulary.
    #[error(
        "token id {token} is outside the vocabulary of {n_vocab} tokens; use token ids of this model's vocabulary"
    )]
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
        /// Position of the first token.
        position: usize,
        /// Return value of `llama_decode`.
        code: i32,
        /// The errors that llama.cpp logged.
        reason: String,
    },
}

/// Result of llama.cpp.
pub type Result<T, E = Error> = std::result::Result<T, E>;
