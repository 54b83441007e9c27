//! SentencePiece vocabularies of the llama family, with llama.cpp's algorithm: neighboring parts are merged into tokens, the
//! pair whose token has the highest score first. Parts that are not tokens are encoded as byte tokens.

use std::collections::HashMap;

use super::merge::merge;
use super::{Error, Vocabulary};

/// The character for a space in token texts.
pub(super) const SPACE: &str = "\u{2581}";

/// Encodes text without special tokens.
pub(super) struct Spm {
    ids: HashMap<String, u32>,
    /// Rank of each token: lower for higher scores.
    ranks: Vec<u32>,
    /// The token of each byte.
    bytes: [Option<u32>; 256],
    /// Whether a space is added before a text.
    add_space_prefix: bool,
}

impl Spm {
    /// An encoder; `ids` are the token ids by text.
    pub(super) fn new(vocabulary: &Vocabulary, ids: &HashMap<&str, u32>) -> Result<Spm, Error> {
        let n_vocab = vocabulary.tokens.len();
        // `x + 0.0` turns -0.0 into 0.0, so that both have the same rank.
        let mut scores: Vec<f32> = vocabulary.scores.iter().map(|score| score + 0.0).collect();
        if let Some(id) = scores.iter().position(|score| score.is_nan()) {
            return Err(Error::Score { id });
        }
        if scores.is_empty() {
            scores = vec![0.0; n_vocab];
        }
        if scores.len() < n_vocab {
            return Err(Error::Scores {
                scores: scores.len(),
                tokens: n_vocab,
            });
        }
        let mut bytes = [None; 256];
        for (slot, byte) in bytes.iter_mut().zip(0u8..=255) {
            *slot = ids.get(format!("<0x{byte:02X}>").as_str()).copied();
        }
        Ok(Spm {
            ids: ids
                .iter()
                .map(|(&text, &id)| (text.to_owned(), id))
                .collect(),
            ranks: scores.into_iter().map(rank).collect(),
            bytes,
            add_space_prefix: vocabulary.adds_space_prefix(),
        })
    }

    /// Appends the ids of `text`; `first` if it is at the start of the input or after a special token.
    pub(super) fn encode(&self, text: &str, first: bool, ids: &mut Vec<u32>) -> Result<(), Error> {
        let prefix = if first && self.add_space_prefix {
            SPACE
        } else {
            ""
        };
        let text = prefix.to_owned() + &text.replace(' ', SPACE);
        for part in self.merge(&text) {
            match self.ids.get(part) {
                Some(&id) => ids.push(id),
                None => {
                    for byte in part.bytes() {
                        let id = self.bytes[usize::from(byte)];
                        ids.push(id.ok_or(Error::NoByteToken { byte })?);
                    }
                }
            }
        }
        Ok(())
    }

    /// The parts of `text` after all merges, in order.
    fn merge<'t>(&self, text: &'t str) -> Vec<&'t str> {
        merge(
            text,
            |_| (),
            |(), (), both| {
                let id = *self.ids.get(both)?;
                Some((*self.ranks.get(id as usize)?, ()))
            },
        )
    }
}

/// A number that decreases as the score increases in the order of `f32::total_cmp`.
fn rank(score: f32) -> u32 {
    let bits = score.to_bits();
    // The bits of negative numbers increase as the number decreases.
    if score.is_sign_negative() {
        bits
    } else {
        !(bits | 1 << 31)
    }
}

/// The bytes of a token in decoded text.
pub(super) fn decode(text: &str) -> Vec<u8> {
    text.replace(SPACE, " ").into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_decrease_with_the_score() {
        let scores = [
            f32::INFINITY,
            3.5,
            1.0,
            f32::MIN_POSITIVE,
            0.0,
            -1e-20,
            -1.0,
            -9e9,
        ];
        assert!(scores.map(rank).is_sorted_by(|a, b| a < b));
    }
}
