//! Text to tokens and back, by the vocabulary in the model's own file.
//!
//! The same ids as llama.cpp, by its order:
//!
//! ```text
//! text ─► special tokens cut out ─┬─► words (pre-tokenizer) ─► bytes as characters ─► merges by rank  ─► ids   (gpt2)
//!                                 └─► spaces as ▁, one before the text ─► merges by score ─► bytes   ─► ids   (llama)
//! ```

mod bpe;
mod byte_level;
mod error;
mod merge;
mod pre_tokenizer;
mod special;
mod spm;
mod vocabulary;

use std::collections::{HashMap, HashSet};

pub use error::{Error, Warning};
pub use special::Role;
pub use vocabulary::{Model, Vocabulary};

use bpe::Bpe;
use special::{Fragment, Kind};
use spm::Spm;

/// Encodes and decodes with one vocabulary.
pub struct Tokenizer {
    encoder: Encoder,
    /// Texts that are tokens before a text is cut into words; longest first, as llama.cpp
    /// searches for them.
    specials: Vec<Special>,
    /// What each token adds to the output.
    pieces: Vec<Box<[u8]>>,
    ends: HashSet<u32>,
    bos: Option<u32>,
    eos: Option<u32>,
    add_bos: Option<u32>,
    add_eos: Option<u32>,
    /// Whether a space was put before texts, which decoding takes off again.
    add_space_prefix: bool,
    warnings: Vec<Warning>,
}

/// What turns text between special tokens into ids.
enum Encoder {
    Bpe(Box<Bpe>),
    Spm(Box<Spm>),
}

struct Special {
    id: u32,
    text: String,
    /// In every text, not only on demand.
    always: bool,
}

impl Tokenizer {
    /// The tokenizer of a model.
    ///
    /// # Errors
    /// The file has no vocabulary of a known kind, or a faulty one, or one whose pre-tokenizer is
    /// not known.
    pub fn from_gguf(metadata: &moe_gguf::Metadata) -> Result<Tokenizer, Error> {
        Tokenizer::new(Vocabulary::from_metadata(metadata)?)
    }

    /// The tokenizer of a vocabulary.
    ///
    /// # Errors
    /// The vocabulary is faulty, or its pre-tokenizer is not known.
    pub fn new(mut vocabulary: Vocabulary) -> Result<Tokenizer, Error> {
        for (id, text) in vocabulary.tokens.iter_mut().enumerate() {
            if text.is_empty() {
                *text = format!("[EMPTY_{id}]"); // as llama.cpp, so that texts stay different
            }
        }
        check_types(&mut vocabulary)?;
        vocabulary.check_roles();
        vocabulary.add_default_roles();
        let mut warnings = std::mem::take(&mut vocabulary.warnings);
        let ids = ids_by_text(&vocabulary.tokens)?;
        let id_of = |text: &str| ids.get(text).copied();
        let encoder = match vocabulary.model {
            Model::Bpe => Encoder::Bpe(Box::new(Bpe::new(&vocabulary, &ids, &mut warnings)?)),
            Model::Spm => Encoder::Spm(Box::new(Spm::new(&vocabulary, &ids)?)),
        };

        let (kinds, ends) = special::classify(
            vocabulary.tokens.len(),
            &vocabulary.token_types,
            &vocabulary.roles,
            id_of,
        );
        let tokens = || (0u32..).zip(&vocabulary.tokens).zip(&kinds);
        let pieces = tokens()
            .map(|((id, text), &kind)| piece(vocabulary.model, id, text, kind))
            .collect::<Result<_, _>>()?;
        let mut specials: Vec<Special> = tokens()
            .filter(|(_, kind)| matches!(kind, Kind::Special | Kind::UserDefined))
            .map(|((id, text), &kind)| Special {
                id,
                text: text.clone(),
                always: kind == Kind::UserDefined,
            })
            .collect();
        specials.sort_by_key(|special| std::cmp::Reverse(special.text.len()));

        let added = |wanted: bool, role: Role, reason| match vocabulary.roles.get(&role) {
            _ if !wanted => Ok(None),
            Some(&id) => Ok(Some(id)),
            None => Err(Error::MissingKey {
                key: role.keys()[0],
                reason,
            }),
        };
        let adds_bos = match &encoder {
            Encoder::Bpe(bpe) => bpe.adds_bos(),
            Encoder::Spm(_) => true,
        };
        let add_bos = added(
            vocabulary.add_bos.unwrap_or(adds_bos),
            Role::Bos,
            "but texts are to start with the BOS token",
        )?;
        let add_eos = added(
            vocabulary.add_eos.unwrap_or(false),
            Role::Eos,
            "but texts are to end with the EOS token",
        )?;

        Ok(Tokenizer {
            encoder,
            specials,
            pieces,
            ends,
            bos: vocabulary.roles.get(&Role::Bos).copied(),
            eos: vocabulary.roles.get(&Role::Eos).copied(),
            add_bos,
            add_eos,
            add_space_prefix: vocabulary.adds_space_prefix(),
            warnings,
        })
    }

    /// What is wrong with the vocabulary and does not keep it from being used.
    pub fn warnings(&self) -> &[Warning] {
        &self.warnings
    }

    /// The ids of `text`.
    ///
    /// `add_special` puts BOS before and EOS after it where the model was trained so.
    /// `parse_special` takes the text of a control token (`<|im_start|>`) for the token; without
    /// it, it is text like any other.
    ///
    /// # Errors
    /// The text has a run of about a million whitespace characters, or a byte that has no token.
    pub fn encode(
        &self,
        text: &str,
        add_special: bool,
        parse_special: bool,
    ) -> Result<Vec<u32>, Error> {
        let mut ids = Vec::new();
        ids.extend(self.add_bos.filter(|_| add_special));
        let specials = self
            .specials
            .iter()
            .filter(|special| parse_special || special.always)
            .map(|special| (special.id, special.text.as_str()));
        let mut first = true;
        for fragment in special::partition(text, specials) {
            match fragment {
                Fragment::Token(id) => ids.push(id),
                Fragment::Text(text) => match &self.encoder {
                    Encoder::Bpe(bpe) => bpe.encode(text, &mut ids)?,
                    Encoder::Spm(spm) => spm.encode(text, first, &mut ids)?,
                },
            }
            first = matches!(fragment, Fragment::Token(_));
        }
        ids.extend(self.add_eos.filter(|_| add_special));
        Ok(ids)
    }

    /// The text of `ids`, special tokens included, without the space that encoding puts before a
    /// text. Bytes that are not UTF-8 become U+FFFD, and ids outside the vocabulary add nothing.
    pub fn decode(&self, ids: &[u32]) -> String {
        let mut bytes: Vec<u8> = ids.iter().flat_map(|&id| self.piece(id)).copied().collect();
        let first = ids.first().map_or(&[][..], |&id| self.piece(id));
        if self.add_space_prefix && first.starts_with(b" ") {
            bytes.remove(0);
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The bytes that a token adds to the output: not always whole characters. Nothing for an id
    /// outside the vocabulary.
    pub fn piece(&self, id: u32) -> &[u8] {
        self.pieces.get(id as usize).map_or(&[], |piece| piece)
    }

    /// Number of tokens; ids are below it.
    pub fn n_vocab(&self) -> usize {
        self.pieces.len()
    }

    /// The token that begins a text.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// The token that ends a text.
    pub fn eos(&self) -> Option<u32> {
        self.eos
    }

    /// Whether generation stops at this token (EOS, and the ends of turns and messages).
    pub fn is_eog(&self, id: u32) -> bool {
        self.ends.contains(&id)
    }
}

fn ids_by_text(tokens: &[String]) -> Result<HashMap<&str, u32>, Error> {
    let mut ids = HashMap::with_capacity(tokens.len());
    for (id, text) in (0u32..).zip(tokens) {
        if let Some(first) = ids.insert(text.as_str(), id) {
            return Err(Error::DuplicateToken {
                first,
                second: id,
                text: text.clone(),
            });
        }
    }
    Ok(ids)
}

/// A list of types may be longer than that of the tokens, as in llama.cpp.
fn check_types(vocabulary: &mut Vocabulary) -> Result<(), Error> {
    let (types, tokens) = (vocabulary.token_types.len(), vocabulary.tokens.len());
    if types != 0 && types < tokens {
        return Err(Error::TokenTypes { types, tokens });
    }
    vocabulary.token_types.truncate(tokens);
    Ok(())
}

/// What a token adds to the output.
fn piece(model: Model, id: u32, text: &str, kind: Kind) -> Result<Box<[u8]>, Error> {
    let bytes = match kind {
        Kind::Normal => match model {
            Model::Bpe => byte_level::decode(text),
            Model::Spm => spm::decode(text),
        },
        Kind::Special | Kind::UserDefined => text.as_bytes().to_vec(),
        Kind::Unused => Vec::new(),
        Kind::Byte => text
            .strip_prefix("<0x")
            .and_then(|rest| u8::from_str_radix(rest.strip_suffix('>')?, 16).ok())
            .map(|byte| vec![byte])
            .ok_or_else(|| Error::ByteToken {
                id,
                text: text.to_owned(),
            })?,
    };
    Ok(bytes.into_boxed_slice())
}
