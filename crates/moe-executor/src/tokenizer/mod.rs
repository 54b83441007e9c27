//! Text to tokens and back, by the vocabulary in the model's own file.
//!
//! Byte-level BPE that gives the same ids as llama.cpp. The order is llama.cpp's:
//!
//! ```text
//! text ─► special tokens cut out ─► words (pre-tokenizer) ─► bytes as characters ─► merges ─► ids
//! ```
//!
//! Text is not normalized, and no space is put before it.

mod byte_level;
mod error;
mod pre_tokenizer;
mod special;
mod vocabulary;

use std::collections::{HashMap, HashSet};

use tokenizers::Model;
use tokenizers::models::bpe::BPE;

pub use error::Error;
pub use special::Role;
pub use vocabulary::Vocabulary;

use pre_tokenizer::PreTokenizer;
use special::{Fragment, Kind};

/// The pre-tokenizer of files that name none.
const DEFAULT_PRE: &str = "default";

/// Encodes and decodes with one vocabulary.
pub struct Tokenizer {
    pre: PreTokenizer,
    bpe: BPE,
    /// Bytes that have no token; llama.cpp leaves them out.
    missing: [bool; 256],
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
    /// The file has no byte-level BPE vocabulary, or a faulty one, or one whose pre-tokenizer is
    /// not known.
    pub fn from_gguf(metadata: &moe_gguf::Metadata) -> Result<Tokenizer, Error> {
        Tokenizer::new(Vocabulary::from_metadata(metadata)?)
    }

    /// The tokenizer of a vocabulary.
    ///
    /// # Errors
    /// The vocabulary is faulty, or its pre-tokenizer is not known.
    pub fn new(mut vocabulary: Vocabulary) -> Result<Tokenizer, Error> {
        let pre = PreTokenizer::new(vocabulary.pre.as_deref().unwrap_or(DEFAULT_PRE))?;
        for (id, text) in vocabulary.tokens.iter_mut().enumerate() {
            if text.is_empty() {
                *text = format!("[EMPTY_{id}]"); // as llama.cpp, so that texts stay different
            }
        }
        let ids = ids_by_text(&vocabulary.tokens)?;
        let id_of = |text: &str| ids.get(text).copied();
        check_types(&vocabulary)?;
        check_roles(&vocabulary)?;

        let (kinds, ends) = special::classify(
            vocabulary.tokens.len(),
            &vocabulary.token_types,
            &vocabulary.roles,
            id_of,
        );
        let tokens = || (0u32..).zip(&vocabulary.tokens).zip(&kinds);
        let pieces = tokens()
            .map(|((id, text), &kind)| piece(id, text, kind))
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
        let add_bos = added(
            vocabulary.add_bos.unwrap_or(pre.add_bos),
            Role::Bos,
            "but texts are to start with the BOS token",
        )?;
        let add_eos = added(
            vocabulary.add_eos.unwrap_or(false),
            Role::Eos,
            "but texts are to end with the EOS token",
        )?;

        let mut missing = [false; 256];
        for (slot, byte) in missing.iter_mut().zip(0u8..=255) {
            *slot = id_of(byte_level::char_of(byte).encode_utf8(&mut [0; 4])).is_none();
        }
        let merges = merges(&vocabulary.merges, id_of)?;
        let bpe = BPE::builder()
            .vocab_and_merges(
                ids.iter()
                    .map(|(text, &id)| ((*text).to_owned(), id))
                    .collect::<tokenizers::models::bpe::Vocab>(),
                merges,
            )
            .build()
            .map_err(Error::Bpe)?;
        Ok(Tokenizer {
            pre,
            bpe,
            missing,
            specials,
            pieces,
            ends,
            bos: vocabulary.roles.get(&Role::Bos).copied(),
            eos: vocabulary.roles.get(&Role::Eos).copied(),
            add_bos,
            add_eos,
        })
    }

    /// The ids of `text`.
    ///
    /// `add_special` puts BOS before and EOS after it where the model was trained so.
    /// `parse_special` takes the text of a control token (`<|im_start|>`) for the token; without
    /// it, it is text like any other.
    ///
    /// # Errors
    /// The text has a run of a million whitespace characters.
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
        for fragment in special::partition(text, specials) {
            match fragment {
                Fragment::Token(id) => ids.push(id),
                Fragment::Text(text) => self.encode_text(text, &mut ids)?,
            }
        }
        ids.extend(self.add_eos.filter(|_| add_special));
        Ok(ids)
    }

    /// Appends the ids of text without special tokens.
    fn encode_text(&self, text: &str, ids: &mut Vec<u32>) -> Result<(), Error> {
        for word in self.pre.split(text)? {
            if self.pre.ignore_merges
                && let Some(id) = self.bpe.token_to_id(&spell(word.as_bytes()))
            {
                ids.push(id);
                continue;
            }
            // Merges do not reach across a byte that has no token.
            for part in word
                .as_bytes()
                .split(|&byte| self.missing[usize::from(byte)])
            {
                let tokens = self.bpe.tokenize(&spell(part)).map_err(Error::Bpe)?;
                ids.extend(tokens.iter().map(|token| token.id));
            }
        }
        Ok(())
    }

    /// The text of `ids`, special tokens included. Bytes that are not UTF-8 become U+FFFD, and ids
    /// outside the vocabulary add nothing.
    pub fn decode(&self, ids: &[u32]) -> String {
        let bytes: Vec<u8> = ids.iter().flat_map(|&id| self.piece(id)).copied().collect();
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

/// Bytes in the alphabet of the merges.
fn spell(bytes: &[u8]) -> String {
    bytes
        .iter()
        .map(|&byte| byte_level::char_of(byte))
        .collect()
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

fn check_types(vocabulary: &Vocabulary) -> Result<(), Error> {
    let (types, tokens) = (vocabulary.token_types.len(), vocabulary.tokens.len());
    if types != 0 && types != tokens {
        return Err(Error::TokenTypes { types, tokens });
    }
    Ok(())
}

fn check_roles(vocabulary: &Vocabulary) -> Result<(), Error> {
    let n_vocab = vocabulary.tokens.len();
    for (role, &id) in &vocabulary.roles {
        if id as usize >= n_vocab {
            return Err(Error::SpecialId {
                key: role.keys()[0],
                id,
                n_vocab,
            });
        }
    }
    Ok(())
}

/// What a token adds to the output.
fn piece(id: u32, text: &str, kind: Kind) -> Result<Box<[u8]>, Error> {
    let bytes = match kind {
        Kind::Normal => byte_level::decode(text),
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

/// The pairs of the merges, checked against the vocabulary. Of a pair that comes twice the first
/// counts.
fn merges(
    lines: &[String],
    id_of: impl Fn(&str) -> Option<u32>,
) -> Result<Vec<(String, String)>, Error> {
    let mut pairs = Vec::with_capacity(lines.len());
    let mut seen = HashSet::with_capacity(lines.len());
    for (index, line) in lines.iter().enumerate() {
        let fault = |fault| Error::Merge {
            index,
            merge: line.clone(),
            fault,
        };
        let (left, right) = line
            .split_once(' ')
            .filter(|(left, right)| !left.is_empty() && !right.is_empty())
            .ok_or_else(|| fault("is not two tokens with a space between".to_owned()))?;
        for text in [left, right, &[left, right].concat()] {
            if id_of(text).is_none() {
                return Err(fault(format!("needs `{text}`, which is not a token")));
            }
        }
        if seen.insert((left, right)) {
            pairs.push((left.to_owned(), right.to_owned()));
        }
    }
    Ok(pairs)
}
