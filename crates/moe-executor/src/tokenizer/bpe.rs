//! Byte-level BPE the way llama.cpp encodes: words by the pre-tokenizer, bytes as characters, neighbours merged by rank.
//!
//! A merge needs no token: what it makes may be a step to a longer token. Text that is no token in the end is spelled in
//! single ASCII characters; characters without a token are left out.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

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
        let mut symbols: Vec<Symbol> = Vec::new();
        let mut char = [0; 4];
        for (start, c) in word.char_indices() {
            let at = symbols.len();
            symbols.push(Symbol {
                text: self.texts.get(&*c.encode_utf8(&mut char)).copied(),
                start,
                end: start + c.len_utf8(),
                before: at.checked_sub(1),
                after: Some(at + 1),
            });
        }
        if let Some(last) = symbols.last_mut() {
            last.after = None;
        }
        let mut pairs = BinaryHeap::new();
        for right in 1..symbols.len() {
            pairs.extend(self.pair(&symbols, Some(right - 1), Some(right)));
        }
        while let Some(Reverse(pair)) = pairs.pop() {
            let (left, right) = (pair.left, pair.right);
            let (l, r) = (symbols[left], symbols[right]);
            // One of the two has been merged since.
            if l.is_empty() || r.is_empty() || r.end - l.start != pair.size {
                continue;
            }
            symbols[left].text = Some(pair.made);
            symbols[left].end = r.end;
            symbols[left].after = r.after;
            symbols[right].end = r.start;
            if let Some(after) = r.after {
                symbols[after].before = Some(left);
            }
            pairs.extend(self.pair(&symbols, l.before, Some(left)));
            pairs.extend(self.pair(&symbols, Some(left), r.after));
        }
        let parts = symbols.iter().filter(|symbol| !symbol.is_empty());
        parts
            .map(|symbol| &word[symbol.start..symbol.end])
            .collect()
    }

    /// The pair of two neighbours, if there is a merge for it.
    fn pair(
        &self,
        symbols: &[Symbol],
        left: Option<usize>,
        right: Option<usize>,
    ) -> Option<Reverse<Pair>> {
        let (left, right) = (left?, right?);
        let (l, r) = (symbols[left], symbols[right]);
        let &(rank, made) = self.merges.get(&(l.text?, r.text?))?;
        Some(Reverse(Pair {
            rank,
            left,
            right,
            size: r.end - l.start,
            made,
        }))
    }
}

/// A part of a word, first a character; empty when it has gone into the one before it.
#[derive(Clone, Copy)]
struct Symbol {
    text: Option<TextId>,
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

/// Two neighbours that have a merge; the least is merged first: by rank, of equal ones the leftmost.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Pair {
    rank: u32,
    left: usize,
    right: usize,
    /// Bytes of both, to find out whether they still are what they were.
    size: usize,
    made: TextId,
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
