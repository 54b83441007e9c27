//! Vocabularies of made-up words.
//!
//! Words are one to three syllables, alone and with a space before them, so that the parts into which
//! a word can be cut are words too: each gives a merge, as in a real vocabulary. Syllables can be
//! made longer, letter by letter, until all texts together have a wanted size.

use super::Error;
use super::spec::{VocabModel, VocabSpec};

/// The texts of a vocabulary.
pub(super) struct Vocab {
    pub(super) tokens: Vec<String>,
    /// GGUF's type of each token.
    pub(super) types: Vec<i32>,
    pub(super) merges: Vec<String>,
    /// The first control token.
    pub(super) first_special: u32,
}

const NORMAL: i32 = 1;
const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const BYTE: i32 = 6;

const N_BYTES: usize = 256;

/// Makes a vocabulary.
pub(super) fn vocab(spec: &VocabSpec) -> Result<Vocab, Error> {
    match spec.model {
        VocabModel::Gpt2 => byte_level(spec),
        VocabModel::Llama => Ok(sentence_piece(spec)),
    }
}

/// Control tokens, 256 bytes, then words.
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

/// 256 bytes, words, then control tokens.
fn byte_level(spec: &VocabSpec) -> Result<Vocab, Error> {
    let n_special = spec.n_special() as usize;
    let n_words = (spec.n_tokens as usize).saturating_sub(N_BYTES + n_special);
    let n_merges = spec.n_merges.map_or(n_words, |n| n as usize);
    let names = special_names(spec, n_special);
    let bytes: Vec<String> = byte_alphabet().map(String::from).collect();
    let fixed = text_size(&bytes) + text_size(&names);

    let make = |n_letters: usize| -> Result<(Words, Vec<String>, u64), Error> {
        let words = Words::new(n_words, n_letters, "Ġ");
        let merges = words.merges(n_merges)?;
        let size = fixed + text_size(&words.texts) + text_size(&merges);
        Ok((words, merges, size))
    };
    let (words, merges, names) = match spec.text_bytes {
        None => {
            let (words, merges, _) = make(0)?;
            (words, merges, names)
        }
        Some(wanted) => {
            let unfit = |problem: String| Error::Spec {
                key: "vocab.text_bytes",
                problem,
            };
            if wanted > MAX_TEXT_BYTES {
                return Err(unfit(format!(
                    "it is {wanted}, at most {MAX_TEXT_BYTES} are made"
                )));
            }
            let (mut low, mut high) = (0, MAX_LETTERS);
            while high - low > 1 {
                let middle = (low + high) / 2;
                if make(middle).is_ok_and(|(_, _, size)| size <= wanted) {
                    low = middle;
                } else {
                    high = middle;
                }
            }
            let (words, merges, size) = make(low)?;
            let rest = wanted.checked_sub(size).ok_or_else(|| {
                unfit(format!(
                    "it is {wanted}, the shortest texts have {size} bytes; give as many or more"
                ))
            })?;
            let names = lengthened(names, rest as usize).ok_or_else(|| {
                unfit(format!(
                    "it is {wanted}, {rest} more than words are made of, and there is no control token to lengthen; raise n_special"
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

/// The text by which runtimes know the token that ends a text.
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

/// The same names, with `bytes` more letters among those that have no meaning; `None` if there are no
/// such.
fn lengthened(mut names: Vec<String>, bytes: usize) -> Option<Vec<String>> {
    let mut meaningless: Vec<&mut String> = names.iter_mut().filter(|name| *name != EOS).collect();
    let n = meaningless.len();
    let (each, rest) = (bytes.checked_div(n)?, bytes % n);
    for (i, name) in meaningless.iter_mut().enumerate() {
        let letters = "a".repeat(each + usize::from(i < rest));
        **name = name.replace("|>", &format!("{letters}|>"));
    }
    Some(names)
}

fn text_size(texts: &[String]) -> u64 {
    texts.iter().map(|text| text.len() as u64).sum()
}

/// The characters that stand for bytes in byte-level BPE, in the order of GPT-2's vocabulary:
/// printable bytes stand for themselves and come first, the others are moved beyond U+0100.
fn byte_alphabet() -> impl Iterator<Item = char> {
    let printable = || ('!'..='~').chain('¡'..='¬').chain('®'..='ÿ');
    let n_others = N_BYTES - printable().count();
    printable().chain((0x100u32..).filter_map(char::from_u32).take(n_others))
}

/// The most bytes of texts that are made: dozens of times those of the largest vocabularies of today.
const MAX_TEXT_BYTES: u64 = 1 << 28;

/// The most letters that are added to syllables.
const MAX_LETTERS: usize = 1 << 9;

const CONSONANTS: &[u8] = b"ktspnmlrdbgfvhjzwcyx";
const VOWELS: &[u8] = b"aeiou";

/// Different syllables, and so the cube root of the most words.
const MAX_SYLLABLES: usize = CONSONANTS.len() * VOWELS.len();

/// What a word is made of.
#[derive(Clone, Copy)]
enum Parts {
    /// The beginning of a syllable.
    Start,
    /// A number of syllables, with a space before them or not.
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
    /// `n` words, with `n_letters` letters added to syllables in turn.
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
        // Beginnings of syllables, which are put together letter by letter.
        for syllable in self.syllables.clone() {
            for end in 2..syllable.len() {
                self.push(n, syllable[..end].to_owned(), Parts::Start);
            }
        }
        let count = self.syllables.len();
        for length in 1..=3 {
            for i in 0..count.pow(length as u32) {
                for spaced in [false, true] {
                    // The digits of `i` to the base of the number of syllables.
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

    /// `n` merges: one for each word, by which it is put together from left to right, then others
    /// that give the same words.
    fn merges(&self, n: usize) -> Result<Vec<String>, Error> {
        let mut merges: Vec<String> = Vec::with_capacity(n);
        for pass in 0..3 {
            for (text, parts) in self.texts.iter().zip(&self.parts) {
                if merges.len() == n {
                    return Ok(merges);
                }
                if let Some(cut) = self.cut(text, *parts, pass) {
                    merges.push(format!("{} {}", &text[..cut], &text[cut..]));
                }
            }
        }
        if merges.len() < n {
            let most = merges.len();
            return Err(Error::Spec {
                key: "vocab.n_merges",
                problem: format!("it is {n}, but so many tokens have {most} merges at most"),
            });
        }
        Ok(merges)
    }

    /// Where a word is cut into two by its `pass`th merge, if it has that many.
    fn cut(&self, text: &str, parts: Parts, pass: usize) -> Option<usize> {
        let (spaced, syllables) = match parts {
            Parts::Start => return (pass == 0).then(|| text.len() - 1),
            Parts::Word {
                spaced,
                syllables,
                n,
            } => (spaced, syllables.into_iter().take(n)),
        };
        let mut cuts = Vec::with_capacity(3);
        let mut end = if spaced { self.space.len() } else { 0 };
        for syllable in syllables {
            cuts.extend((end > 0).then_some(end));
            end += self.syllables[usize::from(syllable)].len();
        }
        // A syllable alone is put together from what comes before its last letter.
        if cuts.is_empty() {
            cuts.push(text.len() - 1);
        }
        cuts.into_iter().rev().nth(pass)
    }
}

/// A consonant, a vowel, and `added` letters.
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

    /// What every vocabulary must be.
    fn check(vocab: &Vocab, n_tokens: usize, n_merges: usize) {
        assert_eq!(
            (vocab.tokens.len(), vocab.types.len()),
            (n_tokens, n_tokens)
        );
        assert_eq!(vocab.merges.len(), n_merges);
        let tokens: HashSet<&str> = vocab.tokens.iter().map(String::as_str).collect();
        assert_eq!(tokens.len(), n_tokens, "all tokens differ");
        let merges: HashSet<&str> = vocab.merges.iter().map(String::as_str).collect();
        assert_eq!(merges.len(), n_merges, "all merges differ");
        for merge in merges {
            let (left, right) = merge.split_once(' ').unwrap();
            let all = [left, right, &format!("{left}{right}")].map(|text| tokens.contains(text));
            assert_eq!(all, [true; 3], "{merge}");
        }
    }

    #[test]
    fn tokens_and_merges_belong_together() {
        check(&vocab(&spec(4096, None, None)).unwrap(), 4096, 3830);
        check(&vocab(&spec(4096, Some(8000), None)).unwrap(), 4096, 8000);
        check(&vocab(&spec(266, None, None)).unwrap(), 266, 0);
        check(&vocab(&spec(300, Some(7), None)).unwrap(), 300, 7);
    }

    #[test]
    fn texts_have_the_wanted_size() {
        for wanted in [100_000, 123_457, 200_000] {
            let vocab = vocab(&spec(4096, Some(8000), Some(wanted))).unwrap();
            check(&vocab, 4096, 8000);
            assert_eq!(text_size(&vocab.tokens) + text_size(&vocab.merges), wanted);
        }
        assert!(vocab(&spec(4096, None, Some(5000))).is_err());
        assert!(vocab(&spec(4096, Some(100_000), None)).is_err());
    }

    #[test]
    fn the_byte_alphabet_is_gpt_2s() {
        let alphabet: Vec<char> = byte_alphabet().collect();
        assert_eq!(alphabet.len(), 256);
        assert_eq!((alphabet[0], alphabet[93], alphabet[94]), ('!', '~', '¡'));
        assert_eq!(alphabet[255], 'Ń');
        assert!(alphabet.contains(&'Ġ'));
    }

    #[test]
    fn a_sentence_piece_vocabulary() {
        let spec = VocabSpec {
            model: VocabModel::Llama,
            ..spec(32_000, None, None)
        };
        let vocab = vocab(&spec).unwrap();
        assert_eq!(vocab.tokens.len(), 32_000);
        assert_eq!(vocab.tokens[..4], ["<unk>", "<s>", "</s>", "<0x00>"]);
        assert_eq!(vocab.types[..4], [UNKNOWN, CONTROL, CONTROL, BYTE]);
        let different: HashSet<&String> = vocab.tokens.iter().collect();
        assert_eq!(different.len(), 32_000);
    }

    #[test]
    fn refuses_impossible_text_sizes() {
        let error_of = |spec: &VocabSpec| vocab(spec).err().unwrap().to_string();
        assert!(error_of(&spec(1000, None, Some(100))).contains("the shortest texts have"));
        assert!(error_of(&spec(1000, None, Some(1 << 60))).contains("at most 268435456 are made"));
        let mut alone = spec(1000, None, Some(1 << 24));
        alone.n_special = 1; // the token that ends a text
        assert!(error_of(&alone).contains("raise n_special"));
    }
}
