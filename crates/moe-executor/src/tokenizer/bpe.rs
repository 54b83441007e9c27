//! Byte-level BPE the way llama.cpp encodes: words by the pre-tokenizer, bytes as characters, neighbours merged by rank.
//!
//! A merge needs no token: what it makes may be a step to a longer token. Text that is no token in the end is spelled in
//! single ASCII characters; characters without a token are left out.

use std::collections::HashMap;

use super::merge::merge;
use super::pre_tokenizer::PreTokenizer;
use super::{Error, Vocabulary, Warning, byte_level};

/// The pre-tokenizer of files that name none.
const DEFAULT_PRE: &str = "default";

/// Number of a text that is a token or that merges make or take. Tokens have their own ids, other texts follow.
type TextId = u32;

/// Encodes text that holds no special tokens.
pub(super) struct Bpe {
    pre: PreTokenizer,
    texts: HashMap<String, TextId>,
    n_vocab: u32,
    /// Rank of each pair of neighbours, and what they make.
    merges: HashMap<(TextId, TextId), (u32, TextId)>,
}

impl Bpe {
    /// `ids` are the tokens by text. Merges that cannot be used are added to `warnings`.
    pub(super) fn new(
        vocabulary: &Vocabulary,
        ids: &HashMap<&str, u32>,
        warnings: &mut Vec<Warning>,
    ) -> Result<Bpe, Error> {
        let texts = ids.iter().map(|(&text, &id)| (text.to_owned(), id));
        let mut bpe = Bpe {
            pre: PreTokenizer::new(vocabulary.pre.as_deref().unwrap_or(DEFAULT_PRE))?,
            texts: texts.collect(),
            n_vocab: vocabulary.tokens.len() as u32,
            merges: HashMap::with_capacity(vocabulary.merges.len()),
        };
        let mut unusable = Unusable::default();
        for (rank, line) in (0u32..).zip(&vocabulary.merges) {
            let Some((left, right)) = split(line) else {
                unusable.add(rank, line);
                continue;
            };
            let pair = (bpe.text_id(left), bpe.text_id(right));
            let made = bpe.text_id(&[left, right].concat());
            if [pair.0, pair.1, made].iter().any(|&id| id >= bpe.n_vocab) {
                unusable.add(rank, line);
            }
            // Of a pair that occurs twice the first counts.
            bpe.merges.entry(pair).or_insert((rank, made));
        }
        warnings.extend(unusable.warning());
        Ok(bpe)
    }

    fn text_id(&mut self, text: &str) -> TextId {
        if let Some(&id) = self.texts.get(text) {
            return id;
        }
        // Every text is in the file, whose size bounds their number.
        let id = self.texts.len() as TextId;
        self.texts.insert(text.to_owned(), id);
        id
    }

    /// Whether texts start with BOS where the file does not say.
    pub(super) fn adds_bos(&self) -> bool {
        self.pre.add_bos
    }

    /// Appends the ids of `text`.
    pub(super) fn encode(&self, text: &str, ids: &mut Vec<u32>) -> Result<(), Error> {
        for word in self.pre.split(text)? {
            let spelled: String = word.bytes().map(byte_level::char_of).collect();
            if self.pre.ignore_merges
                && let Some(id) = self.token(&spelled)
            {
                ids.push(id);
                continue;
            }
            for part in self.merge(&spelled) {
                match self.token(part) {
                    Some(id) => ids.push(id),
                    // llama.cpp looks up single bytes of the spelled text: what is not ASCII is left out.
                    None => ids.extend(part.chars().filter(char::is_ascii).filter_map(|char| {
                        let mut bytes = [0; 4];
                        self.token(char.encode_utf8(&mut bytes))
                    })),
                }
            }
        }
        Ok(())
    }

    fn token(&self, text: &str) -> Option<u32> {
        let id = self.texts.get(text).copied();
        id.filter(|&id| id < self.n_vocab)
    }

    /// The parts of a word that merging leaves, in order.
    fn merge<'t>(&self, word: &'t str) -> Vec<&'t str> {
        let text_id = |char: &str| self.texts.get(char).copied();
        merge(word, text_id, |left, right, _| {
            let &(rank, made) = self.merges.get(&(left?, right?))?;
            Some((rank, Some(made)))
        })
    }
}

/// The two texts of a merge: the first space that is not the first character separates them.
fn split(line: &str) -> Option<(&str, &str)> {
    let second = line.char_indices().nth(1)?.0;
    let at = second + line[second..].find(' ')?;
    let (left, right) = (&line[..at], &line[at + 1..]);
    (!right.is_empty()).then_some((left, right))
}

/// Merges that are not two tokens that make a third.
#[derive(Default)]
struct Unusable {
    count: usize,
    first: Option<(u32, String)>,
}

impl Unusable {
    fn add(&mut self, index: u32, merge: &str) {
        self.count += 1;
        self.first.get_or_insert_with(|| (index, merge.to_owned()));
    }

    fn warning(self) -> Option<Warning> {
        let (index, merge) = self.first?;
        Some(Warning::Merges {
            count: self.count,
            index,
            merge,
        })
    }
}
