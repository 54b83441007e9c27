//! What a GGUF file tells about its vocabulary, as it stands there.

use std::collections::HashMap;

use moe_gguf::Metadata;

use super::Error;
use super::special::Role;

const MODEL: &str = "tokenizer.ggml.model";
const TOKENS: &str = "tokenizer.ggml.tokens";
const TOKEN_TYPE: &str = "tokenizer.ggml.token_type";
const MERGES: &str = "tokenizer.ggml.merges";
const PRE: &str = "tokenizer.ggml.pre";
const ADD_BOS: &str = "tokenizer.ggml.add_bos_token";
const ADD_EOS: &str = "tokenizer.ggml.add_eos_token";

/// A byte-level BPE vocabulary as stored in a file; [`Tokenizer::new`](super::Tokenizer::new)
/// checks it.
#[derive(Clone, Debug, Default)]
pub struct Vocabulary {
    /// Text of each token in GPT-2's byte alphabet; the index is the id.
    pub tokens: Vec<String>,
    /// Pairs of tokens, separated by a space, in the order in which they are merged.
    pub merges: Vec<String>,
    /// GGUF's type of each token (1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused,
    /// 6 byte); empty where the file tells none: all normal.
    pub token_types: Vec<i64>,
    /// Name of the rule that cuts text into words.
    pub pre: Option<String>,
    /// Tokens that the file gives a meaning.
    pub roles: HashMap<Role, u32>,
    /// Whether texts start with the BOS token; `None` leaves it to `pre`.
    pub add_bos: Option<bool>,
    /// Whether texts end with the EOS token.
    pub add_eos: Option<bool>,
}

impl Vocabulary {
    /// Reads the `tokenizer.ggml.*` keys.
    ///
    /// # Errors
    /// The vocabulary is not byte-level BPE, or a key is missing or of a wrong type.
    pub fn from_metadata(metadata: &Metadata) -> Result<Vocabulary, Error> {
        let missing = |key, reason| Error::MissingKey { key, reason };
        let model = metadata.str(MODEL)?;
        match model {
            Some("gpt2") => {}
            Some(other) => {
                return Err(Error::Model {
                    found: other.to_owned(),
                });
            }
            None => return Err(missing(MODEL, "it tells the kind of the vocabulary")),
        }
        let tokens = metadata.strings(TOKENS)?;
        let merges = metadata.strings(MERGES)?;
        let mut roles = HashMap::new();
        for role in Role::ALL {
            for key in role.keys() {
                if let Some(id) = metadata.u32(key)? {
                    roles.insert(role, id);
                }
            }
        }
        Ok(Vocabulary {
            tokens: tokens
                .ok_or_else(|| missing(TOKENS, "it holds the vocabulary"))?
                .to_vec(),
            merges: merges
                .ok_or_else(|| missing(MERGES, "byte-level BPE needs it"))?
                .to_vec(),
            token_types: metadata.i64s(TOKEN_TYPE)?.unwrap_or_default(),
            pre: metadata.str(PRE)?.map(str::to_owned),
            roles,
            add_bos: metadata.bool(ADD_BOS)?,
            add_eos: metadata.bool(ADD_EOS)?,
        })
    }
}
