//! Byte-level BPE: words by the pre-tokenizer, bytes as characters, merges by rank.

use std::collections::{HashMap, HashSet};

use tokenizers::Model;
use tokenizers::models::bpe::BPE;

use super::pre_tokenizer::PreTokenizer;
use super::{Error, Vocabulary, byte_level};

/// The pre-tokenizer of files that name none.
const DEFAULT_PRE: &str = "default";

/// Encodes text that holds no special tokens.
pub(super) struct Bpe {
    pre: PreTokenizer,
    bpe: BPE,
    /// Bytes that have no token; llama.cpp leaves them out.
    missing: [bool; 256],
}

impl Bpe {
    /// `ids` are the tokens by text.
    pub(super) fn new(vocabulary: &Vocabulary, ids: &HashMap<&str, u32>) -> Result<Bpe, Error> {
        let pre = PreTokenizer::new(vocabulary.pre.as_deref().unwrap_or(DEFAULT_PRE))?;
        let mut missing = [false; 256];
        for (slot, byte) in missing.iter_mut().zip(0u8..=255) {
            *slot = !ids.contains_key(spell(&[byte]).as_str());
        }
        let merges = merges(&vocabulary.merges, |text| ids.contains_key(text))?;
        let vocab = ids.iter().map(|(text, &id)| ((*text).to_owned(), id));
        let bpe = BPE::builder()
            .vocab_and_merges(vocab.collect::<tokenizers::models::bpe::Vocab>(), merges)
            .build()
            .map_err(Error::Bpe)?;
        Ok(Bpe { pre, bpe, missing })
    }

    /// Whether texts start with BOS where the file does not say.
    pub(super) fn adds_bos(&self) -> bool {
        self.pre.add_bos
    }

    /// Appends the ids of `text`.
    pub(super) fn encode(&self, text: &str, ids: &mut Vec<u32>) -> Result<(), Error> {
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
}

/// Bytes in the alphabet of the merges.
fn spell(bytes: &[u8]) -> String {
    bytes
        .iter()
        .map(|&byte| byte_level::char_of(byte))
        .collect()
}

/// The pairs of the merges, checked against the vocabulary. Of a pair that comes twice the first
/// counts.
fn merges(
    lines: &[String],
    is_token: impl Fn(&str) -> bool,
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
            if !is_token(text) {
                return Err(fault(format!("needs `{text}`, which is not a token")));
            }
        }
        if seen.insert((left, right)) {
            pairs.push((left.to_owned(), right.to_owned()));
        }
    }
    Ok(pairs)
}
