//! Errors and warnings of the tokenizer.

/// Errors of the tokenizer. Messages about the vocabulary name the GGUF key and the entry.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A metadata key has the wrong type.
    #[error(transparent)]
    Metadata(#[from] moe_gguf::Error),
    /// A required key is missing.
    #[error("metadata key `{key}` is missing: {reason}; convert the model again")]
    MissingKey {
        /// The GGUF key.
        key: &'static str,
        /// Why it is required.
        reason: &'static str,
    },
    /// The kind of vocabulary is not supported.
    #[error(
        "tokenizer.ggml.model `{found}` is not supported; the supported values are `gpt2` (byte-level BPE), `llama` \
         (SentencePiece), `gemma4` (BPE on characters) and `none` (no vocabulary)"
    )]
    Model {
        /// The value in the file.
        found: String,
    },
    /// The pre-tokenizer is not supported.
    #[error("tokenizer.ggml.pre `{found}` is not supported; the supported values are {supported}")]
    PreTokenizer {
        /// The value in the file.
        found: String,
        /// The supported values.
        supported: String,
    },
    /// Two tokens have the same text.
    #[error(
        "tokenizer.ggml.tokens: tokens {first} and {second} have the same text, `{}`; convert the model again",
        text.escape_debug()
    )]
    DuplicateToken {
        /// The lower id.
        first: u32,
        /// The higher id.
        second: u32,
        /// Their text.
        text: String,
    },
    /// The list of token types is shorter than the list of tokens.
    #[error(
        "tokenizer.ggml.token_type has {types} entries for {tokens} tokens; convert the model again"
    )]
    TokenTypes {
        /// Length of the list of types.
        types: usize,
        /// Length of the list of tokens.
        tokens: usize,
    },
    /// The list of scores is shorter than the list of tokens.
    #[error(
        "tokenizer.ggml.scores has {scores} entries for {tokens} tokens; convert the model again"
    )]
    Scores {
        /// Length of the list of scores.
        scores: usize,
        /// Length of the list of tokens.
        tokens: usize,
    },
    /// A score is NaN.
    #[error("tokenizer.ggml.scores: entry {id} is NaN; convert the model again")]
    Score {
        /// The token.
        id: usize,
    },
    /// A byte of a text has no token.
    #[error(
        "the text contains the byte 0x{byte:02X}, which has no token in the vocabulary; remove its character"
    )]
    NoByteToken {
        /// The byte.
        byte: u8,
    },
    /// The text of a byte token is not a byte.
    #[error(
        "tokenizer.ggml.tokens: token {id} is a byte token, but its text `{}` is not <0x00> to <0xFF>; convert the model again",
        text.escape_debug()
    )]
    ByteToken {
        /// The token.
        id: u32,
        /// Its text.
        text: String,
    },
    /// The file has no vocabulary.
    #[error(
        "the model file has no vocabulary (tokenizer.ggml.model is `none`); use token ids instead of text"
    )]
    NoVocabulary,
    /// The text cannot be split into words.
    #[error("the text cannot be split into words: {source}; shorten its longest run of {run}")]
    Split {
        /// What the characters of the run are.
        run: &'static str,
        /// Why the text cannot be split.
        source: Box<fancy_regex::Error>,
    },
}

impl Error {
    /// The error of the run at the start of `text`. A space before a word is part of the word.
    pub(super) fn split(error: fancy_regex::Error, text: &str) -> Error {
        Error::Split {
            run: if text.chars().take(2).all(char::is_whitespace) {
                "whitespace"
            } else {
                "characters without whitespace"
            },
            source: Box::new(error),
        }
    }
}

/// A problem of a vocabulary. llama.cpp accepts it with a warning, too.
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
        /// The id that is used instead.
        used: Option<u32>,
    },
    /// Entries of the list of merges that are not two tokens whose concatenation is a token.
    #[error(
        "tokenizer.ggml.merges: {} not two tokens whose concatenation is a token; the first is entry {index}, `{}`",
        if *count == 1 { "1 entry is".to_owned() } else { format!("{count} entries are") },
        merge.escape_debug()
    )]
    Merges {
        /// Number of these entries.
        count: usize,
        /// Index of the first in the list.
        index: u32,
        /// Text of the first.
        merge: String,
    },
}
