//! The vocabulary in a GGUF file.

use std::collections::HashMap;

use moe_gguf::{Metadata, Value, ValueType};

use super::special::Role;
use super::{Error, Warning};

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
    /// What is wrong with the file's keys and does not keep the vocabulary from being used.
    pub warnings: Vec<Warning>,
}

/// Keys with ids of tokens that only other kinds of vocabularies use.
const UNUSED_IDS: [&str; 4] = [
    "tokenizer.ggml.unknown_token_id",
    "tokenizer.ggml.seperator_token_id",
    "tokenizer.ggml.padding_token_id",
    "tokenizer.ggml.mask_token_id",
];

/// Rules of `tokenizer.ggml.pre` whose vocabularies have no BOS token unless the file names one.
fn has_no_bos(pre: &str) -> bool {
    matches!(pre, "glm4" | "glm5" | "chatglm-bpe")
}

/// The id of a special token, in whichever integer type; it may be outside the vocabulary.
fn special_id(metadata: &Metadata, key: &'static str) -> Result<Option<i128>, Error> {
    match metadata.get(key).map(Value::as_i128) {
        Some(Some(id)) => Ok(Some(id)),
        // The error of the typed look-up names file and key.
        _ => Ok(metadata.u32(key)?.map(i128::from)),
    }
}

/// Scores may be integers.
fn scores(metadata: &Metadata) -> Result<Vec<f32>, Error> {
    let is_integer = |value: &Value| match value {
        Value::Array(list) => list.element_type() == ValueType::I32,
        _ => false,
    };
    if metadata.get(SCORES).is_some_and(is_integer) {
        let scores = metadata.i64s(SCORES)?.unwrap_or_default();
        return Ok(scores.iter().map(|&score| score as f32).collect());
    }
    Ok(metadata.f32s(SCORES)?.unwrap_or_default())
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
        let merges = match model {
            Model::Bpe => merges.ok_or_else(|| missing(MERGES, "byte-level BPE needs it"))?,
            Model::Spm => &[],
        };
        let mut vocabulary = Vocabulary {
            model,
            tokens: tokens
                .ok_or_else(|| missing(TOKENS, "it holds the vocabulary"))?
                .to_vec(),
            merges: merges.to_vec(),
            scores: scores(metadata)?,
            token_types: metadata.i64s(TOKEN_TYPE)?.unwrap_or_default(),
            pre: metadata.str(PRE)?.map(str::to_owned),
            roles: HashMap::new(),
            add_bos: metadata.bool(ADD_BOS)?,
            add_eos: metadata.bool(ADD_EOS)?,
            add_space_prefix: metadata.bool(ADD_SPACE_PREFIX)?,
            warnings: Vec::new(),
        };
        let keys = Role::ALL.iter().flat_map(|role| {
            let keys = role.keys().iter();
            keys.map(|&key| (key, Some(*role)))
        });
        for (key, role) in keys.chain(UNUSED_IDS.map(|key| (key, None))) {
            if let Some(id) = special_id(metadata, key)? {
                vocabulary.set_role(key, role, id);
            }
        }
        Ok(vocabulary)
    }

    /// Gives a token its meaning (none for `role` `None`). An id outside the vocabulary is ignored with a warning, as in
    /// llama.cpp.
    fn set_role(&mut self, key: &'static str, role: Option<Role>, id: i128) {
        let n_vocab = self.tokens.len();
        let valid = u32::try_from(id).ok();
        match (role, valid.filter(|&id| (id as usize) < n_vocab)) {
            (Some(role), Some(id)) => {
                self.roles.insert(role, id);
            }
            (None, Some(_)) => {}
            (role, None) => {
                let other = |role| {
                    let set = self.roles.get(&role).copied();
                    set.or_else(|| self.default_id(role))
                };
                let used = role.and_then(other);
                self.warnings.push(Warning::SpecialId {
                    key,
                    id,
                    n_vocab,
                    used,
                });
            }
        }
    }

    /// Takes away the meanings of ids outside the vocabulary, with a warning.
    pub(super) fn check_roles(&mut self) {
        let mut roles: Vec<(Role, u32)> = std::mem::take(&mut self.roles).into_iter().collect();
        roles.sort_unstable_by_key(|&(role, _)| role as u8);
        for (role, id) in roles {
            self.set_role(role.keys()[0], Some(role), id.into());
        }
    }

    /// The id that llama.cpp takes where the file names none.
    fn default_id(&self, role: Role) -> Option<u32> {
        let id = match (self.model, role) {
            (Model::Spm, Role::Bos) => 1,
            (Model::Spm, Role::Eos) => 2,
            (Model::Bpe, Role::Bos) if self.pre.as_deref().is_some_and(has_no_bos) => return None,
            (Model::Bpe, Role::Bos | Role::Eos) => 11,
            _ => return None,
        };
        Some(id).filter(|&id| (id as usize) < self.tokens.len())
    }

    /// Gives tokens the meaning that they have in llama.cpp where the file names none.
    pub(super) fn add_default_roles(&mut self) {
        for role in [Role::Bos, Role::Eos] {
            if let Some(id) = self.default_id(role) {
                self.roles.entry(role).or_insert(id);
            }
        }
    }

    /// Whether a space is put before a text.
    pub(super) fn adds_space_prefix(&self) -> bool {
        self.add_space_prefix.unwrap_or(self.model == Model::Spm)
    }
}
