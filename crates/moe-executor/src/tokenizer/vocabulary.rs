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
const NAME: &str = "general.name";

/// The kind of a vocabulary (`tokenizer.ggml.model`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Model {
    /// `gpt2`: byte-level BPE.
    #[default]
    Bpe,
    /// `llama`: SentencePiece pieces with scores, and byte tokens for other text.
    Spm,
    /// `gemma4`: BPE on characters with the pre-tokenizer `gemma4`.
    Gemma4,
    /// `none` or `no_vocab`: token ids without texts.
    None,
}

/// The pre-tokenizer of vocabularies that may have no list of merges, as in llama.cpp.
const KIMI_K2: &str = "kimi-k2";

/// A vocabulary as stored in a file; [`Tokenizer::new`](super::Tokenizer::new) checks it.
#[derive(Clone, Debug, Default)]
pub struct Vocabulary {
    /// The kind.
    pub model: Model,
    /// Text of each token by id, in GPT-2's byte alphabet if the pre-tokenizer of [`Model::Bpe`] has words in this alphabet.
    pub tokens: Vec<String>,
    /// Pairs of tokens separated by a space, in the order of their ranks ([`Model::Bpe`], [`Model::Gemma4`]).
    pub merges: Vec<String>,
    /// Score of each token ([`Model::Spm`]). If empty, all scores are equal.
    pub scores: Vec<f32>,
    /// GGUF type of each token (1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte). If empty, all tokens are
    /// normal.
    pub token_types: Vec<i64>,
    /// Name of the pre-tokenizer; unused for [`Model::Gemma4`].
    pub pre: Option<String>,
    /// Tokens with a role in the file's metadata.
    pub roles: HashMap<Role, u32>,
    /// Whether texts start with the BOS token. The default depends on `pre`; it is true for [`Model::Spm`].
    pub add_bos: Option<bool>,
    /// Whether texts end with the EOS token. The default is false.
    pub add_eos: Option<bool>,
    /// Whether a space is added before a text. The default is true for [`Model::Spm`], else false.
    pub add_space_prefix: Option<bool>,
    /// Whether whitespace after special tokens of a text is removed, as in Phi 3.
    pub strip_after_special: bool,
    /// Problems of the file's keys that do not prevent using the vocabulary.
    pub warnings: Vec<Warning>,
}

/// Keys with token ids that only other kinds of vocabularies use.
const UNUSED_IDS: [&str; 4] = [
    "tokenizer.ggml.unknown_token_id",
    "tokenizer.ggml.seperator_token_id",
    "tokenizer.ggml.padding_token_id",
    "tokenizer.ggml.mask_token_id",
];

/// Whether vocabularies with this pre-tokenizer have no default BOS token.
fn has_no_bos(pre: &str) -> bool {
    matches!(pre, "glm4" | "glm5" | "chatglm-bpe")
}

/// Whether llama.cpp recognizes the model as Phi 3, by its name.
fn is_phi3(metadata: &Metadata) -> Result<bool, Error> {
    let name = metadata.str(NAME)?.unwrap_or_default().to_ascii_lowercase();
    Ok(name.contains("phi-3") || name.contains("phi3"))
}

/// The id of a special token, of any integer type; it may be outside the vocabulary.
fn special_id(metadata: &Metadata, key: &'static str) -> Result<Option<i128>, Error> {
    match metadata.get(key).map(Value::as_i128) {
        Some(Some(id)) => Ok(Some(id)),
        // The error of the typed lookup names file and key.
        _ => Ok(metadata.u32(key)?.map(i128::from)),
    }
}

/// The scores, which may be integers; empty if the key is missing.
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
    /// The kind of vocabulary is not supported, a key is missing, or a key has the wrong type.
    pub fn from_metadata(metadata: &Metadata) -> Result<Vocabulary, Error> {
        let missing = |key, reason| Error::MissingKey { key, reason };
        let model = match metadata.str(MODEL)? {
            Some("gpt2") => Model::Bpe,
            Some("llama") => Model::Spm,
            Some("gemma4") => Model::Gemma4,
            Some("none" | "no_vocab") => {
                return Ok(Vocabulary {
                    model: Model::None,
                    ..Vocabulary::default()
                });
            }
            Some(other) => {
                return Err(Error::Model {
                    found: other.to_owned(),
                });
            }
            None => return Err(missing(MODEL, "it names the kind of vocabulary")),
        };
        let tokens = metadata.strings(TOKENS)?;
        let token_types = metadata.i64s(TOKEN_TYPE)?;
        if let (Some([]), Some([_, ..])) = (token_types.as_deref(), tokens) {
            let tokens = tokens.map_or(0, <[String]>::len);
            return Err(Error::TokenTypes { types: 0, tokens });
        }
        // Like in llama.cpp, an empty name is a missing name.
        let pre = metadata.str(PRE)?.filter(|pre| !pre.is_empty());
        let merges = metadata.strings(MERGES)?;
        let merges = match (model, merges) {
            (Model::Bpe | Model::Gemma4, Some(merges)) => merges.to_vec(),
            (Model::Bpe, None) if pre == Some(KIMI_K2) => Vec::new(),
            (Model::Bpe | Model::Gemma4, None) => return Err(missing(MERGES, "BPE requires it")),
            (Model::Spm | Model::None, _) => Vec::new(),
        };
        let scores = scores(metadata)?;
        if let (Some(tokens @ [_, ..]), true) =
            (tokens, scores.is_empty() && metadata.get(SCORES).is_some())
        {
            return Err(Error::Scores {
                scores: 0,
                tokens: tokens.len(),
            });
        }
        let mut vocabulary = Vocabulary {
            model,
            tokens: tokens
                .ok_or_else(|| missing(TOKENS, "it contains the vocabulary"))?
                .to_vec(),
            merges,
            scores,
            token_types: token_types.unwrap_or_default(),
            pre: pre.map(str::to_owned),
            roles: HashMap::new(),
            add_bos: metadata.bool(ADD_BOS)?,
            add_eos: metadata.bool(ADD_EOS)?,
            add_space_prefix: metadata.bool(ADD_SPACE_PREFIX)?,
            strip_after_special: is_phi3(metadata)?,
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

    /// Sets the role of a token, or with `role` `None` only checks the id. Like in llama.cpp, an id outside the vocabulary is
    /// ignored with a warning.
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

    /// Removes roles whose id is outside the vocabulary, with a warning.
    pub(super) fn check_roles(&mut self) {
        let mut roles: Vec<(Role, u32)> = std::mem::take(&mut self.roles).into_iter().collect();
        roles.sort_unstable_by_key(|&(role, _)| role as u8);
        for (role, id) in roles {
            self.set_role(role.keys()[0], Some(role), id.into());
        }
    }

    /// The id that llama.cpp uses if the file does not define the role.
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

    /// Adds llama.cpp's defaults for roles that the file does not define.
    pub(super) fn add_default_roles(&mut self) {
        for role in [Role::Bos, Role::Eos] {
            if let Some(id) = self.default_id(role) {
                self.roles.entry(role).or_insert(id);
            }
        }
    }

    /// Whether a space is added before a text.
    pub(super) fn adds_space_prefix(&self) -> bool {
        self.add_space_prefix.unwrap_or(self.model == Model::Spm)
    }
}
