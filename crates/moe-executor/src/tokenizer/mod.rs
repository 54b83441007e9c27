//! Tokenization and detokenization with the vocabulary of the model file.
//!
//! The steps are those of llama.cpp, and the ids are the same:
//!
//! ```text
//! text ─► split at special tokens ─┬─► words (pre-tokenizer) ─► bytes as characters ─► merges by rank ─► ids   (gpt2)
//!                                  ├─► ▁ for spaces ─► lines ─► merges by rank ─► bytes                ─► ids   (gemma4)
//!                                  └─► ▁ for spaces and before the text ─► merges by score ─► bytes   ─► ids   (llama)
//! ```

mod bpe;
mod byte_level;
mod error;
mod merge;
mod pre_tokenizer;
mod rules;
mod special;
mod spm;
mod vocabulary;

use std::collections::{HashMap, HashSet};

pub use error::{Error, Warning};
pub use pre_tokenizer::pre_tokenizers;
pub use special::Role;
pub use vocabulary::{Model, Vocabulary};

use bpe::Bpe;
use rules::Alphabet;
use special::{Fragment, Kind};
use spm::Spm;

/// A tokenizer: encodes and decodes with one vocabulary.
pub struct Tokenizer {
    encoder: Encoder,
    /// Special tokens, longest text first: the order in which llama.cpp searches for them.
    specials: Vec<Special>,
    /// The bytes of each token in decoded text.
    pieces: Vec<Box<[u8]>>,
    /// Tokens that end generation.
    ends: HashSet<u32>,
    bos: Option<u32>,
    eos: Option<u32>,
    /// The BOS token if encoding adds it.
    add_bos: Option<u32>,
    /// The EOS token if encoding adds it.
    add_eos: Option<u32>,
    /// Whether encoding adds a space before texts, which decoding removes.
    add_space_prefix: bool,
    warnings: Vec<Warning>,
}

/// Encodes text between special tokens.
enum Encoder {
    Bpe(Box<Bpe>),
    Spm(Box<Spm>),
    /// The file has no vocabulary.
    None,
}

/// A token that is searched for before the text is split into words.
struct Special {
    id: u32,
    text: String,
    /// Whether it is recognized without `parse_special`, too.
    always: bool,
    /// Whether whitespace after it is removed.
    strip_after: bool,
}

impl Tokenizer {
    /// The tokenizer of a model.
    ///
    /// # Errors
    /// The vocabulary or its pre-tokenizer is not supported, or the vocabulary is invalid.
    pub fn from_gguf(metadata: &moe_gguf::Metadata) -> Result<Tokenizer, Error> {
        Tokenizer::new(Vocabulary::from_metadata(metadata)?)
    }

    /// The tokenizer of a vocabulary.
    ///
    /// # Errors
    /// The vocabulary is invalid, or its pre-tokenizer is not supported.
    pub fn new(mut vocabulary: Vocabulary) -> Result<Tokenizer, Error> {
        for (id, text) in vocabulary.tokens.iter_mut().enumerate() {
            if text.is_empty() {
                *text = format!("[EMPTY_{id}]"); // like llama.cpp, so that all texts are distinct
            }
        }
        check_types(&mut vocabulary)?;
        vocabulary.check_roles();
        vocabulary.add_default_roles();
        let mut warnings = std::mem::take(&mut vocabulary.warnings);
        let ids = ids_by_text(&vocabulary.tokens)?;
        let id_of = |text: &str| ids.get(text).copied();
        let encoder = match vocabulary.model {
            Model::Bpe | Model::Gemma4 => {
                Encoder::Bpe(Box::new(Bpe::new(&vocabulary, &ids, &mut warnings)?))
            }
            Model::Spm => Encoder::Spm(Box::new(Spm::new(&vocabulary, &ids)?)),
            Model::None => Encoder::None,
        };
        let decode: fn(&str) -> Vec<u8> = match &encoder {
            Encoder::Bpe(bpe) if bpe.alphabet() == Alphabet::Bytes => byte_level::decode,
            _ => spm::decode,
        };

        let (kinds, ends) = special::classify(
            vocabulary.tokens.len(),
            &vocabulary.token_types,
            &vocabulary.roles,
            id_of,
        );
        let tokens = || (0u32..).zip(&vocabulary.tokens).zip(&kinds);
        let pieces = tokens()
            .map(|((id, text), &kind)| piece(decode, id, text, kind))
            .collect::<Result<_, _>>()?;
        let mut specials: Vec<Special> = tokens()
            .filter(|(_, kind)| matches!(kind, Kind::Special | Kind::UserDefined))
            .map(|((id, text), &kind)| Special {
                id,
                text: text.clone(),
                always: kind == Kind::UserDefined,
                strip_after: vocabulary.strip_after_special
                    && !special::KEEP_AFTER.contains(&text.as_str()),
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
            // Like in llama.cpp, the key is ignored, because files of Gemma 4 have a wrong value.
            Encoder::Bpe(bpe) if bpe.alphabet() == Alphabet::Characters => bpe.adds_bos(),
            Encoder::Bpe(bpe) => vocabulary.add_bos.unwrap_or(bpe.adds_bos()),
            Encoder::Spm(_) => vocabulary.add_bos.unwrap_or(true),
            Encoder::None => false,
        };
        let add_bos = added(adds_bos, Role::Bos, "texts start with a BOS token")?;
        let add_eos = added(
            vocabulary.add_eos.unwrap_or(false),
            Role::Eos,
            "`add_eos_token` is true",
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

    /// Problems of the vocabulary that do not prevent using it.
    pub fn warnings(&self) -> &[Warning] {
        &self.warnings
    }

    /// The token ids of `text`.
    ///
    /// With `add_special`, BOS and EOS are added if the vocabulary requests them. With `parse_special`, the text of a control
    /// token (`<|im_start|>`) becomes that token; otherwise it is encoded like other text.
    ///
    /// # Errors
    /// The text contains about a million consecutive characters of the same kind (whitespace, letters), or a byte without a token,
    /// or the file has no vocabulary.
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
            .map(|special| (special.id, special.text.as_str(), special.strip_after));
        let mut first = true;
        for fragment in special::partition(text, specials) {
            match fragment {
                Fragment::Token(id) => ids.push(id),
                Fragment::Text(text) => match &self.encoder {
                    Encoder::Bpe(bpe) => bpe.encode(text, &mut ids)?,
                    Encoder::Spm(spm) => spm.encode(text, first, &mut ids)?,
                    Encoder::None => return Err(Error::NoVocabulary),
                },
            }
            first = matches!(fragment, Fragment::Token(_));
        }
        ids.extend(self.add_eos.filter(|_| add_special));
        Ok(ids)
    }

    /// The text of `ids`, including special tokens, without the space that encoding adds before a text. Invalid UTF-8 becomes
    /// U+FFFD, and ids outside the vocabulary are skipped.
    pub fn decode(&self, ids: &[u32]) -> String {
        let mut bytes: Vec<u8> = ids.iter().flat_map(|&id| self.piece(id)).copied().collect();
        let first = ids.first().map_or(&[][..], |&id| self.piece(id));
        if self.add_space_prefix && first.starts_with(b" ") {
            bytes.remove(0);
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The bytes of a token in decoded text, which may be incomplete UTF-8. Empty for ids outside the vocabulary.
    pub fn piece(&self, id: u32) -> &[u8] {
        self.pieces.get(id as usize).map_or(&[], |piece| piece)
    }

    /// Whether the file has a vocabulary. Without a vocabulary, all texts are empty.
    pub fn has_vocabulary(&self) -> bool {
        !matches!(self.encoder, Encoder::None)
    }

    /// Number of tokens; 0 without a vocabulary.
    pub fn n_vocab(&self) -> usize {
        self.pieces.len()
    }

    /// The token at the start of a text (BOS).
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// The token at the end of a text (EOS).
    pub fn eos(&self) -> Option<u32> {
        self.eos
    }

    /// Whether the token ends generation: EOS and the ends of turns and messages.
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

/// Checks the number of token types. Like in llama.cpp, the list may be longer than the list of tokens.
fn check_types(vocabulary: &mut Vocabulary) -> Result<(), Error> {
    let (types, tokens) = (vocabulary.token_types.len(), vocabulary.tokens.len());
    if types != 0 && types < tokens {
        return Err(Error::TokenTypes { types, tokens });
    }
    vocabulary.token_types.truncate(tokens);
    Ok(())
}

/// The bytes of a token in decoded text. `decode` returns those of a normal token.
fn piece(decode: fn(&str) -> Vec<u8>, id: u32, text: &str, kind: Kind) -> Result<Box<[u8]>, Error> {
    let bytes = match kind {
        Kind::Normal => decode(text),
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
