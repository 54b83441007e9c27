//! What can be wrong with a vocabulary.

/// Errors of the tokenizer. Each names the GGUF key, or the entry of it, that is at fault.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A key of the metadata is of another type than it should be.
    #[error(transparent)]
    Metadata(#[from] moe_gguf::Error),
    /// A key that is needed is missing.
    #[error("metadata key `{key}` is missing, {reason}; convert the model again")]
    MissingKey {
        /// The GGUF key.
        key: &'static str,
        /// Why it is needed.
        reason: &'static str,
    },
    /// The vocabulary is not of a kind that is supported.
    #[error(
        "tokenizer.ggml.model is `{found}`, supported are `gpt2` (byte-level BPE) and `llama` (SentencePiece)"
    )]
    Model {
        /// The value in the file.
        found: String,
    },
    /// How text is cut into words is not known for this vocabulary.
    #[error("tokenizer.ggml.pre is `{found}`, supported are {supported}")]
    PreTokenizer {
        /// The value in the file.
        found: String,
        /// The values that are supported.
        supported: String,
    },
    /// Two ids have the same text.
    #[error("tokenizer.ggml.tokens: ids {first} and {second} are both `{}`", text.escape_debug())]
    DuplicateToken {
        /// The lower id.
        first: u32,
        /// The higher id.
        second: u32,
        /// Their text.
        text: String,
    },
    /// The list of token types does not belong to the list of tokens.
    #[error(
        "tokenizer.ggml.token_type has {types} entries for {tokens} tokens; convert the model again"
    )]
    TokenTypes {
        /// Length of the list of types.
        types: usize,
        /// Length of the list of tokens.
        tokens: usize,
    },
    /// The list of scores does not belong to the list of tokens.
    #[error(
        "tokenizer.ggml.scores has {scores} entries for {tokens} tokens; convert the model again"
    )]
    Scores {
        /// Length of the list of scores.
        scores: usize,
        /// Length of the list of tokens.
        tokens: usize,
    },
    /// A score that cannot be compared with the others.
    #[error("tokenizer.ggml.scores: entry {id} is not a number")]
    Score {
        /// The token.
        id: usize,
    },
    /// A byte of a text is in no token.
    #[error(
        "the text has a byte 0x{byte:02X} that no token of the vocabulary stands for; leave its character out"
    )]
    NoByteToken {
        /// The byte.
        byte: u8,
    },
    /// A token marked as a single byte is not spelled as one.
    #[error("tokenizer.ggml.tokens: id {id} is a byte token, but `{}` is not of the form <0x2A>", text.escape_debug())]
    ByteToken {
        /// The token.
        id: u32,
        /// Its text.
        text: String,
    },
    /// The text cannot be cut into words.
    #[error("the text cannot be cut into words: {0}; shorten its longest run of whitespace")]
    Split(#[source] Box<fancy_regex::Error>),
}

impl Error {
    pub(super) fn split(error: fancy_regex::Error) -> Error {
        Error::Split(Box::new(error))
    }
}

/// Something in a vocabulary that llama.cpp loads with a warning, too.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Warning {
    /// The id of a special token is outside the vocabulary.
    #[error(
        "metadata key `{key}` is {id}, but the vocabulary has {n_vocab} tokens; {}",
        match used {
            Some(used) => format!("the default id {used} is used"),
            None => "the key is ignored".to_owned(),
        }
    )]
    SpecialId {
        /// The GGUF key.
        key: &'static str,
        /// Its value.
        id: i128,
        /// Number of tokens.
        n_vocab: usize,
        /// The id used instead.
        used: Option<u32>,
    },
    /// Merges that are not two tokens that make a third.
    #[error(
        "tokenizer.ggml.merges: {} not two tokens that make a third, the first is entry {index}, `{}`",
        if *count == 1 { "1 entry is".to_owned() } else { format!("{count} entries are") },
        merge.escape_debug()
    )]
    Merges {
        /// How many.
        count: usize,
        /// Position of the first in the list.
        index: u32,
        /// The first entry.
        merge: String,
    },
}
