//! BPE with llama.cpp's algorithm: split the text into words, map bytes to characters, merge neighbors by rank.
//!
//! The result of a merge need not be a token, because it may be a step to a longer token. A part that is not a token after all
//! merges is encoded as single ASCII characters; characters without a token are skipped. Vocabularies like Gemma 4's have no
//! byte alphabet: they replace spaces instead, and encode such a part as byte tokens.

use std::borrow::Cow;
use std::collections::HashMap;

use super::merge::merge;
use super::pre_tokenizer::PreTokenizer;
use super::rules::Alphabet;
use super::spm::SPACE;
use super::{Error, Model, Vocabulary, Warning, byte_level};

/// The pre-tokenizer if the file does not name one.
const DEFAULT_PRE: &str = "default";
/// The pre-tokenizer of [`Model::Gemma4`], for any name in the file.
const GEMMA4_PRE: &str = "gemma4";

/// Number of a text that is a token or occurs in a merge. Tokens have their ids, other texts the numbers from `n_vocab` on.
type TextId = u32;

/// Encodes text without special tokens.
pub(super) struct Bpe {
    pre: PreTokenizer,
    texts: HashMap<String, TextId>,
    n_vocab: u32,
    /// Rank and result of each pair.
    merges: HashMap<(TextId, TextId), (u32, TextId)>,
}

impl Bpe {
    /// An encoder; `ids` are the token ids by text. Adds a warning for merges that are not of tokens.
    pub(super) fn new(
        vocabulary: &Vocabulary,
        ids: &HashMap<&str, u32>,
        warnings: &mut Vec<Warning>,
    ) -> Result<Bpe, Error> {
        let texts = ids.iter().map(|(&text, &id)| (text.to_owned(), id));
        let pre = match vocabulary.model {
            Model::Gemma4 => GEMMA4_PRE,
            _ => vocabulary.pre.as_deref().unwrap_or(DEFAULT_PRE),
        };
        let mut bpe = Bpe {
            pre: PreTokenizer::new(pre)?,
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
            // The first occurrence of a pair determines its rank.
            bpe.merges.entry(pair).or_insert((rank, made));
        }
        warnings.extend(unusable.warning());
        Ok(bpe)
    }

    fn text_id(&mut self, text: &str) -> TextId {
        if let Some(&id) = self.texts.get(text) {
            return id;
        }
        // All texts are in the file, so its size bounds their number.
        let id = self.texts.len() as TextId;
        self.texts.insert(text.to_owned(), id);
        id
    }

    /// Whether texts start with BOS by default.
    pub(super) fn adds_bos(&self) -> bool {
        self.pre.add_bos
    }

    /// What the tokens are made of.
    pub(super) fn alphabet(&self) -> Alphabet {
        self.pre.alphabet
    }

    /// Appends the ids of `text`.
    pub(super) fn encode(&self, text: &str, ids: &mut Vec<u32>) -> Result<(), Error> {
        let text: Cow<'_, str> = match self.pre.alphabet {
            Alphabet::Bytes => Cow::Borrowed(text),
            Alphabet::Characters => Cow::Owned(text.replace(' ', SPACE)),
        };
        for word in self.pre.split(&text)? {
            let spelled: Cow<'_, str> = match self.pre.alphabet {
                Alphabet::Bytes => Cow::Owned(word.bytes().map(byte_level::char_of).collect()),
                Alphabet::Characters => Cow::Borrowed(word),
            };
            if self.skips_merges(word)
                && let Some(id) = self.token(&spelled)
            {
                ids.push(id);
                continue;
            }
            for part in self.merge(&spelled) {
                match self.token(part) {
                    Some(id) => ids.push(id),
                    None => self.encode_unknown(part, ids),
                }
            }
        }
        Ok(())
    }

    /// Whether a word becomes one token without merges if it is a token.
    fn skips_merges(&self, word: &str) -> bool {
        let is_lines =
            || self.pre.alphabet == Alphabet::Characters && word.bytes().all(|byte| byte == b'\n');
        self.pre.ignore_merges || is_lines()
    }

    /// Appends the ids of a part that is not a token. Characters or bytes without a token are skipped.
    fn encode_unknown(&self, part: &str, ids: &mut Vec<u32>) {
        match self.pre.alphabet {
            // llama.cpp looks up single bytes of the mapped text, so characters outside ASCII are skipped.
            Alphabet::Bytes => {
                ids.extend(part.chars().filter(char::is_ascii).filter_map(|char| {
                    let mut bytes = [0; 4];
                    self.token(char.encode_utf8(&mut bytes))
                }));
            }
            Alphabet::Characters => {
                let token = |byte: u8| self.token(&format!("<0x{byte:02X}>"));
                ids.extend(part.bytes().filter_map(token));
            }
        }
    }

    /// The token with a text.
    fn token(&self, text: &str) -> Option<u32> {
        let id = self.texts.get(text).copied();
        id.filter(|&id| id < self.n_vocab)
    }

    /// The parts of a word after all merges, in order.
    fn merge<'t>(&self, word: &'t str) -> Vec<&'t str> {
        let text_id = |char: &str| self.texts.get(char).copied();
        merge(word, text_id, |left, right, _| {
            let &(rank, made) = self.merges.get(&(left?, right?))?;
            Some((rank, Some(made)))
        })
    }
}

/// The two texts of a merge. The separator is the first space after the first character.
fn split(line: &str) -> Option<(&str, &str)> {
    let second = line.char_indices().nth(1)?.0;
    let at = second + line[second..].find(' ')?;
    let (left, right) = (&line[..at], &line[at + 1..]);
    (!right.is_empty()).then_some((left, right))
}

/// Merges that are not two tokens whose concatenation is a token.
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
