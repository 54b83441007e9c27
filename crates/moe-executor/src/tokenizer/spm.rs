//! The SentencePiece vocabularies of the llama family, the way llama.cpp encodes with them: characters are merged into
//! tokens, the pair whose token has the highest score first; what is no token in the end is spelled in bytes.

use std::cmp::Ordering;
use std::collections::{BinaryHeap, HashMap};

use super::{Error, Vocabulary};

/// Stands for a space in the texts of tokens.
const SPACE: &str = "\u{2581}";

/// Encodes text that holds no special tokens.
pub(super) struct Spm {
    ids: HashMap<String, u32>,
    /// Score of each token.
    scores: Vec<f32>,
    /// The token of each byte.
    bytes: [Option<u32>; 256],
    /// Whether a space is put before a text.
    add_space_prefix: bool,
}

impl Spm {
    /// `ids` are the tokens by text.
    pub(super) fn new(vocabulary: &Vocabulary, ids: &HashMap<&str, u32>) -> Result<Spm, Error> {
        let n_vocab = vocabulary.tokens.len();
        // Minus zero becomes zero, as it is equal to it.
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
            scores,
            bytes,
            add_space_prefix: vocabulary.adds_space_prefix(),
        })
    }

    /// Appends the ids of `text`; `first` where nothing but a special token is before it.
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

    /// The parts of `text` that merging leaves, in order.
    fn merge<'t>(&self, text: &'t str) -> Vec<&'t str> {
        let mut symbols: Vec<Symbol> = Vec::new();
        for (start, char) in text.char_indices() {
            let at = symbols.len();
            symbols.push(Symbol {
                start,
                end: start + char.len_utf8(),
                before: at.checked_sub(1),
                after: Some(at + 1),
            });
        }
        if let Some(last) = symbols.last_mut() {
            last.after = None;
        }
        let mut pairs = BinaryHeap::new();
        for right in 1..symbols.len() {
            pairs.extend(self.pair(text, &symbols, Some(right - 1), Some(right)));
        }
        while let Some(pair) = pairs.pop() {
            let (left, right) = (pair.left, pair.right);
            let (l, r) = (symbols[left], symbols[right]);
            // one of the two has been merged since
            if l.is_empty() || r.is_empty() || r.end - l.start != pair.size {
                continue;
            }
            symbols[left].end = r.end;
            symbols[left].after = r.after;
            symbols[right].end = r.start;
            if let Some(after) = r.after {
                symbols[after].before = Some(left);
            }
            pairs.extend(self.pair(text, &symbols, l.before, Some(left)));
            pairs.extend(self.pair(text, &symbols, Some(left), r.after));
        }
        let parts = symbols.iter().filter(|symbol| !symbol.is_empty());
        parts
            .map(|symbol| &text[symbol.start..symbol.end])
            .collect()
    }

    /// The pair of two neighbours, if it makes a token.
    fn pair(
        &self,
        text: &str,
        symbols: &[Symbol],
        left: Option<usize>,
        right: Option<usize>,
    ) -> Option<Pair> {
        let (left, right) = (left?, right?);
        let (start, end) = (symbols[left].start, symbols[right].end);
        let id = *self.ids.get(&text[start..end])?;
        Some(Pair {
            score: *self.scores.get(id as usize)?,
            left,
            right,
            size: end - start,
        })
    }
}

/// A part of the text, first a character; empty when it has gone into the one before it.
#[derive(Clone, Copy)]
struct Symbol {
    start: usize,
    end: usize,
    before: Option<usize>,
    after: Option<usize>,
}

impl Symbol {
    fn is_empty(&self) -> bool {
        self.start == self.end
    }
}

/// Two neighbours that make a token; the greatest is merged first.
struct Pair {
    score: f32,
    left: usize,
    right: usize,
    /// Bytes of both, to find out whether they still are what they were.
    size: usize,
}

impl Ord for Pair {
    /// By score, of equal ones the leftmost is greater.
    fn cmp(&self, other: &Pair) -> Ordering {
        let scores = self.score.total_cmp(&other.score);
        scores.then(other.left.cmp(&self.left))
    }
}

impl PartialOrd for Pair {
    fn partial_cmp(&self, other: &Pair) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Pair {
    fn eq(&self, other: &Pair) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Pair {}

/// The bytes that the text of a token stands for.
pub(super) fn decode(text: &str) -> Vec<u8> {
    text.replace(SPACE, " ").into_bytes()
}
