//! Vocabularies of synthetic words.
//!
//! Words have one to three syllables, with and without a preceding space. The parts of a word at each syllable boundary are
//! also words, so that each boundary is a valid merge. Letters can be added to syllables until all texts together have a given
//! size.

use super::Error;
use super::spec::{VocabModel, VocabSpec};

/// The texts of a vocabulary.
pub(super) struct Vocab {
    pub(super) tokens: Vec<String>,
    /// `tokenizer.ggml.token_type` of each token.
    pub(super) types: Vec<i32>,
    pub(super) merges: Vec<String>,
    /// Id of the first control token.
    pub(super) first_special: u32,
}

const NORMAL: i32 = 1;
const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const BYTE: i32 = 6;

const N_BYTES: usize = 256;

/// Generates a vocabulary.
pub(super) fn vocab(spec: &VocabSpec) -> Result<Vocab, Error> {
    match spec.model {
        VocabModel::Gpt2 => byte_level(spec),
        VocabModel::Llama => Ok(sentence_piece(spec)),
    }
}

/// Generates a SentencePiece vocabulary: control tokens, 256 bytes, words.
fn sentence_piece(spec: &VocabSpec) -> Vocab {
    let mut tokens = ["<unk>", "<s>", "</s>"].map(str::to_owned).to_vec();
    let mut types = vec![UNKNOWN, CONTROL, CONTROL];
    tokens.extend((0..N_BYTES).map(|byte| format!("<0x{byte:02X}>")));
    types.resize(tokens.len(), BYTE);
    let n_words = (spec.n_tokens as usize).saturating_sub(tokens.len());
    tokens.extend(Words::new(n_words, 0, "▁").texts);
    types.resize(tokens.len(), NORMAL);
    Vocab {
        tokens,
        types,
        merges: Vec::new(),
        first_special: 1,
    }
}

/// Generates a byte-level BPE vocabulary: 256 bytes, words, control tokens.
fn byte_level(spec: &VocabSpec) -> Result<Vocab, Error> {
    let n_special = spec.n_special() as usize;
    let n_words = (spec.n_tokens as usize).saturating_sub(N_BYTES + n_special);
    let n_merges = spec.n_merges.map_or(n_words, |n| n as usize);
    let names = special_names(spec, n_special);
    let bytes: Vec<String> = byte_alphabet().map(String::from).collect();
    let fixed = text_size(&bytes) + text_size(&names);

    let generate = |n_letters: usize| -> Result<(Words, Vec<String>, u64), Error> {
        let words = Words::new(n_words, n_letters, "Ġ");
        let merges = words.merges(n_merges)?;
        let size = fixed + text_size(&words.texts) + text_size(&merges);
        Ok((words, merges, size))
    };
    let (words, merges, names) = match spec.text_bytes {
        None => {
            let (words, merges, _) = generate(0)?;
            (words, merges, names)
        }
        Some(target) => {
            let invalid = |problem: String| Error::Spec {
                key: "vocab.text_bytes",
                problem,
            };
            if target > MAX_TEXT_BYTES {
                return Err(invalid(format!(
                    "{target} is out of range (at most {MAX_TEXT_BYTES})"
                )));
            }
            let (mut low, mut high) = (0, MAX_LETTERS);
            while high - low > 1 {
                let middle = (low + high) / 2;
                if generate(middle).is_ok_and(|(_, _, size)| size <= target) {
                    low = middle;
                } else {
                    high = middle;
                }
            }
            let (words, merges, size) = generate(low)?;
            let rest = target.checked_sub(size).ok_or_else(|| {
                invalid(format!(
                    "{target} is less than the size of the shortest texts ({size})"
                ))
            })?;
            let names = lengthened(names, rest as usize).ok_or_else(|| {
                invalid(format!(
                    "{target} is {rest} more than the size of the words, and only control tokens other than EOS can be lengthened; increase n_special"
                ))
            })?;
            (words, merges, names)
        }
    };

    let mut tokens = bytes;
    tokens.extend(words.texts);
    let mut types = vec![NORMAL; tokens.len()];
    let first_special = tokens.len() as u32;
    tokens.extend(names);
    types.resize(tokens.len(), CONTROL);
    Ok(Vocab {
        tokens,
        types,
        merges,
        first_special,
    })
}

/// Text of the EOS token, by which runtimes recognize it.
const EOS: &str = "<|endoftext|>";

fn special_names(spec: &VocabSpec, n_special: usize) -> Vec<String> {
    let first = spec.n_tokens - n_special as u32;
    let name = |id| {
        if id == spec.eos.unwrap_or(first) {
            EOS.to_owned()
        } else {
            format!("<|control_{id}|>")
        }
    };
    (first..spec.n_tokens).map(name).collect()
}

/// Adds `bytes` letters to the names, distributed over all names except EOS. `None` if there are no others.
fn lengthened(mut names: Vec<String>, bytes: usize) -> Option<Vec<String>> {
    let mut others: Vec<&mut String> = names.iter_mut().filter(|name| *name != EOS).collect();
    let n = others.len();
    let (each, rest) = (bytes.checked_div(n)?, bytes % n);
    for (i, name) in others.iter_mut().enumerate() {
        let letters = "a".repeat(each + usize::from(i < rest));
        **name = name.replace("|>", &format!("{letters}|>"));
    }
    Some(names)
}

fn text_size(texts: &[String]) -> u64 {
    texts.iter().map(|text| text.len() as u64).sum()
}

/// Returns the characters that represent bytes in byte-level BPE, in the order of GPT-2's vocabulary.
///
/// Printable bytes represent themselves and are first. The other bytes are mapped to U+0100 and above.
fn byte_alphabet() -> impl Iterator<Item = char> {
    let printable = || ('!'..='~').chain('¡'..='¬').chain('®'..='ÿ');
    let n_others = N_BYTES - printable().count();
    printable().chain((0x100u32..).filter_map(char::from_u32).take(n_others))
}

/// Maximum total size of texts in bytes: dozens of times that of the largest current vocabularies.
const MAX_TEXT_BYTES: u64 = 1 << 28;

/// Maximum number of letters added to syllables.
const MAX_LETTERS: usize = 1 << 9;

const CONSONANTS: &[u8] = b"ktspnmlrdbgfvhjzwcyx";
const VOWELS: &[u8] = b"aeiou";

/// Number of different syllables.
const MAX_SYLLABLES: usize = CONSONANTS.len() * VOWELS.len();

/// The composition of a word.
#[derive(Clone, Copy)]
enum Parts {
    /// The start of a syllable.
    Start,
    /// The first `n` of `syllables`, with or without a preceding space.
    Word {
        spaced: bool,
        syllables: [u8; 3],
        n: usize,
    },
}

struct Words {
    texts: Vec<String>,
    parts: Vec<Parts>,
    syllables: Vec<String>,
    space: &'static str,
}

impl Words {
    /// Generates `n` words. `n_letters` letters are distributed over the syllables.
    fn new(n: usize, n_letters: usize, space: &'static str) -> Words {
        let enough = |s: &usize| 2 * (s + s * s + s * s * s) >= n;
        let n_syllables = (1..MAX_SYLLABLES).find(enough).unwrap_or(MAX_SYLLABLES);
        let syllables: Vec<String> = (0..n_syllables)
            .map(|i| {
                let added = n_letters / n_syllables + usize::from(i < n_letters % n_syllables);
                syllable(i, added)
            })
            .collect();
        let mut words = Words {
            texts: Vec::with_capacity(n),
            parts: Vec::with_capacity(n),
            syllables,
            space,
        };
        words.collect(n);
        words
    }

    fn collect(&mut self, n: usize) {
        // Starts of syllables, which are merged letter by letter.
        for syllable in self.syllables.clone() {
            for end in 2..syllable.len() {
                self.push(n, syllable[..end].to_owned(), Parts::Start);
            }
        }
        let count = self.syllables.len();
        for length in 1..=3 {
            for i in 0..count.pow(length as u32) {
                for spaced in [false, true] {
                    // The digits of `i` in the base `count` select the syllables.
                    let digits = [i % count, i / count % count, i / count / count % count];
                    let syllables = digits.map(|digit| digit as u8);
                    let word = Parts::Word {
                        spaced,
                        syllables,
                        n: length,
                    };
                    self.push(n, self.text(spaced, &syllables[..length]), word);
                }
                if self.texts.len() >= n {
                    return;
                }
            }
        }
    }

    fn push(&mut self, n: usize, text: String, parts: Parts) {
        if self.texts.len() < n {
            self.texts.push(text);
            self.parts.push(parts);
        }
    }

    fn text(&self, spaced: bool, syllables: &[u8]) -> String {
        let space = if spaced { self.space } else { "" };
        let syllables = syllables
            .iter()
            .map(|&s| self.syllables[usize::from(s)].as_str());
        [space].into_iter().chain(syllables).collect()
    }

    /// Generates `n` merges: first one per word, which joins its last syllable, then other merges with the same results.
    fn merges(&self, n: usize) -> Result<Vec<String>, Error> {
        let mut merges: Vec<String> = Vec::with_capacity(n);
        for pass in 0..3 {
            for (text, parts) in self.texts.iter().zip(&self.parts) {
                if merges.len() == n {
                    return Ok(merges);
                }
                if let Some(split) = self.split(text, *parts, pass) {
                    merges.push(format!("{} {}", &text[..split], &text[split..]));
                }
            }
        }
        if merges.len() < n {
            let max = merges.len();
            return Err(Error::Spec {
                key: "vocab.n_merges",
                problem: format!("{n} is out of range (at most {max} for this number of tokens)"),
            });
        }
        Ok(merges)
    }

    /// Returns the byte at which merge `pass` of a word splits it, or `None` if the word has fewer merges.
    fn split(&self, text: &str, parts: Parts, pass: usize) -> Option<usize> {
        let (spaced, syllables) = match parts {
            Parts::Start => return (pass == 0).then(|| text.len() - 1),
            Parts::Word {
                spaced,
                syllables,
                n,
            } => (spaced, syllables.into_iter().take(n)),
        };
        let mut splits = Vec::with_capacity(3);
        let mut end = if spaced { self.space.len() } else { 0 };
        for syllable in syllables {
            splits.extend((end > 0).then_some(end));
            end += self.syllables[usize::from(syllable)].len();
        }
        // A single syllable without a space is split before its last letter.
        if splits.is_empty() {
            splits.push(text.len() - 1);
        }
        splits.into_iter().rev().nth(pass)
    }
}

/// Returns a syllable: a consonant, a vowel, and `added` letters.
fn syllable(i: usize, added: usize) -> String {
    let consonant = CONSONANTS[i / VOWELS.len() % CONSONANTS.len()];
    let start = [consonant, VOWELS[i % VOWELS.len()]].map(char::from);
    start
        .into_iter()
        .chain("nstlr".chars().cycle().take(added))
        .collect()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn spec(n_tokens: u32, n_merges: Option<u32>, text_bytes: Option<u64>) -> VocabSpec {
        VocabSpec {
            n_tokens,
            model: VocabModel::Gpt2,
            pre: "gpt-2".to_owned(),
            n_merges,
            n_special: 10,
            text_bytes,
            bos: None,
            eos: None,
            pad: None,
        }
    }

    /// Checks properties of all vocabularies: unique tokens and merges, and merges of tokens.
    fn check(vocab: &Vocab, n_tokens: usize, n_merges: usize) {
        assert_eq!(
            (vocab.tokens.len(), vocab.types.len()),
            (n_tokens, n_tokens)
        );
        assert_eq!(vocab.merges.len(), n_merges);
        let tokens: HashSet<&str> = vocab.tokens.iter().map(String::as_str).collect();
        assert_eq!(tokens.len(), n_tokens, "tokens are not unique");
        let merges: HashSet<&str> = vocab.merges.iter().map(String::as_str).collect();
        assert_eq!(merges.len(), n_merges, "merges are not unique");
        for merge in merges {
            let (left, right) = merge.split_once(' ').unwrap();
            let all = [left, right, &format!("{left}{right}")].map(|text| tokens.contains(text));
            assert_eq!(all, [true; 3], "{merge}");
        }
    }

    #[test]
    fn merges_consist_of_tokens() {
        check(&vocab(&spec(4096, None, None)).unwrap(), 4096, 3830);
        check(&vocab(&spec(4096, Some(8000), None)).unwrap(), 4096, 8000);
        check(&vocab(&spec(266, None, None)).unwrap(), 266, 0);
        check(&vocab(&spec(300, Some(7), None)).unwrap(), 300, 7);
    }

    #[test]
    fn texts_have_the_given_size() {
        for target in [100_000, 123_457, 200_000] {
            let vocab = vocab(&spec(4096, Some(8000), Some(target))).unwrap();
            check(&vocab, 4096, 8000);
            assert_eq!(text_size(&vocab.tokens) + text_size(&vocab.merges), target);
        }
    }

    #[test]
    fn byte_alphabet_is_that_of_gpt_2() {
        let alphabet: Vec<char> = byte_alphabet().collect();
        assert_eq!(alphabet.len(), 256);
        assert_eq!((alphabet[0], alphabet[93], alphabet[94]), ('!', '~', '¡'));
        assert_eq!(alphabet[255], 'Ń');
        assert!(alphabet.contains(&'Ġ'));
    }

    #[test]
    fn generates_sentence_piece_vocabularies() {
        let spec = VocabSpec {
            model: VocabModel::Llama,
            ..spec(32_000, None, None)
        };
        let vocab = vocab(&spec).unwrap();
        assert_eq!(vocab.tokens.len(), 32_000);
        assert_eq!(vocab.tokens[..4], ["<unk>", "<s>", "</s>", "<0x00>"]);
        assert_eq!(vocab.types[..4], [UNKNOWN, CONTROL, CONTROL, BYTE]);
        let unique: HashSet<&String> = vocab.tokens.iter().collect();
        assert_eq!(unique.len(), 32_000);
    }

    #[test]
    fn rejects_impossible_sizes_of_texts_and_merges() {
        let invalid_key = |spec: &VocabSpec| match vocab(spec) {
            Err(Error::Spec { key, .. }) => key,
            other => panic!("{:?}", other.err()),
        };
        for too_small_or_large in [100, 1 << 60] {
            let spec = spec(1000, None, Some(too_small_or_large));
            assert_eq!(invalid_key(&spec), "vocab.text_bytes");
        }
        let mut only_eos = spec(1000, None, Some(1 << 24));
        only_eos.n_special = 1;
        assert_eq!(invalid_key(&only_eos), "vocab.text_bytes");
        let too_many_merges = spec(4096, Some(100_000), None);
        assert_eq!(invalid_key(&too_many_merges), "vocab.n_merges");
    }
}
