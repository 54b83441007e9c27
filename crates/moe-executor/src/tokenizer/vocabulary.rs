//! What a GGUF file tells about its vocabulary, as it stands there.

use std::collections::HashMap;

use moe_gguf::Metadata;

use super::Error;
use super::special::Role;

const MODEL: &str = "tokenizer.ggml.model";
const SCORES: &str = "tokenizer.ggml.scores";
const TOKENS: &str = "tokenizer.ggml.tokens";
const TOKEN_TYPE: &str = "tokenizer.ggml.token_type";
const MERGES: &str = "tokenizer.ggml.merges";
const PRE: &str = "tokenizer.ggml.pre";
const ADD_BOS: &str = "tokenizer.ggml.add_bos_token";
const ADD_EOS: &str = "tokenizer.ggml.add_eos_token";
const ADD_SPACE_PREFIX: &str = "tokenizer.ggml.add_space_prefix";

/// How a vocabulary is used: what `tokenizer.ggml.model` names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Model {
    /// `gpt2`: byte-level BPE.
    #[default]
    Bpe,
    /// `llama`: SentencePiece pieces with scores, and bytes for what they do not cover.
    Spm,
}

/// A vocabulary as stored in a file; [`Tokenizer::new`](super::Tokenizer::new) checks it.
#[derive(Clone, Debug, Default)]
pub struct Vocabulary {
    /// How it is used.
    pub model: Model,
    /// Text of each token, for [`Model::Bpe`] in GPT-2's byte alphabet; the index is the id.
    pub tokens: Vec<String>,
    /// Pairs of tokens, separated by a space, in the order in which they are merged
    /// ([`Model::Bpe`]).
    pub merges: Vec<String>,
    /// Score of each token ([`Model::Spm`]); empty where the file tells none: all alike.
    pub scores: Vec<f32>,
    /// GGUF's type of each token (1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused,
    /// 6 byte); empty where the file tells none: all normal.
    pub token_types: Vec<i64>,
    /// Name of the rule that cuts text into words.
    pub pre: Option<String>,
    /// Tokens that the file gives a meaning.
    pub roles: HashMap<Role, u32>,
    /// Whether texts start with the BOS token; `None` leaves it to `pre`, or means that they do
    /// ([`Model::Spm`]).
    pub add_bos: Option<bool>,
    /// Whether texts end with the EOS token.
    pub add_eos: Option<bool>,
    /// Whether a space is put before a text; `None` means that it is for [`Model::Spm`] only.
    pub add_space_prefix: Option<bool>,
}

impl Vocabulary {
    /// Reads the `tokenizer.ggml.*` keys.
    ///
    /// # Errors
    /// The vocabulary is of an unknown kind, or a key is missing or of a wrong type.
    pub fn from_metadata(metadata: &Metadata) -> Result<Vocabulary, Error> {
        let missing = |key, reason| Error::MissingKey { key, reason };
        let model = match metadata.str(MODEL)? {
            Some("gpt2") => Model::Bpe,
            Some("llama") => Model::Spm,
            Some(other) => {
                return Err(Error::Model {
                    found: other.to_owned(),
                });
            }
            None => return Err(missing(MODEL, "it tells the kind of the vocabulary")),
        };
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
        let merges = match model {
            Model::Bpe => merges.ok_or_else(|| missing(MERGES, "byte-level BPE needs it"))?,
            Model::Spm => &[],
        };
        Ok(Vocabulary {
            model,
            tokens: tokens
                .ok_or_else(|| missing(TOKENS, "it holds the vocabulary"))?
                .to_vec(),
            merges: merges.to_vec(),
            scores: metadata.f32s(SCORES)?.unwrap_or_default(),
            token_types: metadata.i64s(TOKEN_TYPE)?.unwrap_or_default(),
            pre: metadata.str(PRE)?.map(str::to_owned),
            roles,
            add_bos: metadata.bool(ADD_BOS)?,
            add_eos: metadata.bool(ADD_EOS)?,
            add_space_prefix: metadata.bool(ADD_SPACE_PREFIX)?,
        })
    }

    /// Gives the tokens a meaning that llama.cpp takes them to have where the file is silent.
    pub(super) fn add_default_roles(&mut self) {
        if self.model == Model::Spm {
            for (role, id) in [(Role::Bos, 1), (Role::Eos, 2)] {
                if (id as usize) < self.tokens.len() {
                    self.roles.entry(role).or_insert(id);
                }
            }
        }
    }

    /// Whether a space is put before a text.
    pub(super) fn adds_space_prefix(&self) -> bool {
        self.add_space_prefix.unwrap_or(self.model == Model::Spm)
    }
}
