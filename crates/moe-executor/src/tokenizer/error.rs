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
    #[error("tokenizer.ggml.token_type has {types} entries for {tokens} tokens")]
    TokenTypes {
        /// Length of the list of types.
        types: usize,
        /// Length of the list of tokens.
        tokens: usize,
    },
    /// The list of scores does not belong to the list of tokens.
    #[error("tokenizer.ggml.scores has {scores} entries for {tokens} tokens")]
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
    /// A merge is not two tokens that make a third.
    #[error("tokenizer.ggml.merges: entry {index}, `{}`, {fault}", merge.escape_debug())]
    Merge {
        /// Position in the list.
        index: usize,
        /// The entry.
        merge: String,
        /// What is wrong with it.
        fault: String,
    },
    /// The id of a special token is outside the vocabulary.
    #[error("metadata key `{key}` is {id}, the vocabulary has {n_vocab} tokens")]
    SpecialId {
        /// The GGUF key.
        key: &'static str,
        /// Its value.
        id: u32,
        /// Number of tokens.
        n_vocab: usize,
    },
    /// The text cannot be cut into words.
    #[error("the text has a run of about a million whitespace characters; shorten it")]
    WhitespaceRun,
    /// The BPE library refused the vocabulary or a text.
    #[error("byte-level BPE: {0}")]
    Bpe(Box<dyn std::error::Error + Send + Sync>),
}
