//! Vocabularies whose tokens are the most frequent pairs of neighbors in the texts of a test: neighbors in different words do not
//! become a token, so that the ids depend on the words.

use std::collections::{BTreeMap, BTreeSet};

use moe_gguf::{Array, Value, ValueType};

/// Keys of a header.
pub type Keys = Vec<(&'static str, Value)>;

const NORMAL: i32 = 1;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const BYTE: i32 = 6;

/// Tokens with their types, and the list of merges.
#[derive(Default)]
struct Vocabulary {
    tokens: Vec<String>,
    types: Vec<i32>,
    merges: Vec<String>,
}

impl Vocabulary {
    fn add(&mut self, token: impl Into<String>, ty: i32) {
        self.tokens.push(token.into());
        self.types.push(ty);
    }

    /// Adds pairs until there are `n_vocab` tokens, and tokens that occur in no text if there are too few pairs.
    fn fill(&mut self, n_vocab: usize, pairs: Vec<(String, String)>) {
        let known: BTreeSet<String> = self.tokens.iter().cloned().collect();
        let is_new = |(left, right): &(String, String)| !known.contains(&format!("{left}{right}"));
        let n_pairs = n_vocab - self.tokens.len();
        for (left, right) in pairs.into_iter().filter(is_new).take(n_pairs) {
            self.merges.push(format!("{left} {right}"));
            self.add(left + &right, NORMAL);
        }
        for id in self.tokens.len()..n_vocab {
            self.add(format!("<|extra_{id}|>"), NORMAL);
        }
    }

    fn keys(self) -> Keys {
        let strings = |texts: Vec<String>| {
            let texts = texts.into_iter().map(Value::String);
            Value::Array(Box::new(Array::new(ValueType::String, texts).unwrap()))
        };
        let types = self.types.into_iter().map(Value::I32);
        let types = Array::new(ValueType::I32, types).unwrap();
        vec![
            ("tokenizer.ggml.tokens", strings(self.tokens)),
            ("tokenizer.ggml.token_type", Value::Array(Box::new(types))),
            ("tokenizer.ggml.merges", strings(self.merges)),
        ]
    }
}

/// The pairs of neighbors in `texts`, the most frequent first. Pairs with the same text are one pair.
fn pairs(texts: &[Vec<String>]) -> Vec<(String, String)> {
    let mut counts: BTreeMap<(&str, &str), usize> = BTreeMap::new();
    for pair in texts.iter().flat_map(|text| text.windows(2)) {
        *counts
            .entry((pair[0].as_str(), pair[1].as_str()))
            .or_default() += 1;
    }
    let mut counts: Vec<_> = counts.into_iter().collect();
    counts.sort_by_key(|&(_, count)| std::cmp::Reverse(count));
    let mut seen = BTreeSet::new();
    let owned = |((left, right), _): ((&str, &str), usize)| (left.to_owned(), right.to_owned());
    let pairs = counts.into_iter().map(owned);
    pairs
        .filter(|(left, right)| seen.insert(format!("{left}{right}")))
        .collect()
}

/// GPT-2's alphabet: the character of each byte.
fn alphabet() -> Vec<String> {
    let is_printable = |byte: u8| matches!(byte, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
    let mut others = (0x100..).filter_map(char::from_u32);
    let mut char_of = |byte: u8| {
        if is_printable(byte) {
            char::from(byte)
        } else {
            others.next().unwrap()
        }
    };
    (0..=255).map(|byte| char_of(byte).to_string()).collect()
}

/// A byte-level vocabulary of `n_vocab` tokens, without control tokens.
pub fn of_bytes(n_vocab: usize, texts: &[String]) -> Keys {
    let alphabet = alphabet();
    let mut vocabulary = Vocabulary::default();
    for char in &alphabet {
        vocabulary.add(char.clone(), NORMAL);
    }
    let spelled = |text: &String| -> Vec<String> {
        let bytes = text.bytes();
        bytes
            .map(|byte| alphabet[usize::from(byte)].clone())
            .collect()
    };
    let texts: Vec<Vec<String>> = texts.iter().map(spelled).collect();
    vocabulary.fill(n_vocab, pairs(&texts));
    vocabulary.keys()
}

/// A vocabulary of `n_vocab` tokens like Gemma 4's: control tokens, byte tokens except some, characters except some, runs of line
/// feeds, pairs.
pub fn of_characters(n_vocab: usize, texts: &[String]) -> Keys {
    let spelled = |text: &String| -> Vec<String> {
        let text = text.replace(' ', "▁");
        text.chars().map(String::from).collect()
    };
    let texts: Vec<Vec<String>> = texts.iter().map(spelled).collect();
    let mut vocabulary = Vocabulary::default();
    for token in ["<pad>", "<eos>", "<bos>", "<unk>", "<turn|>"] {
        vocabulary.add(token, CONTROL);
    }
    vocabulary.add("<|tool_response>", USER_DEFINED);
    vocabulary.add("</s>", NORMAL);
    for byte in (0..=255u8).filter(|byte| byte % 16 != 15) {
        vocabulary.add(format!("<0x{byte:02X}>"), BYTE);
    }
    for n_lines in 1..=3 {
        vocabulary.add("\n".repeat(n_lines), NORMAL);
    }
    let chars: BTreeSet<&String> = texts
        .iter()
        .flatten()
        .filter(|char| *char != "\n")
        .collect();
    for (_, char) in (0..).zip(chars).filter(|(i, _)| i % 8 != 7) {
        vocabulary.add(char, NORMAL);
    }
    vocabulary.fill(n_vocab, pairs(&texts));
    let mut keys = vocabulary.keys();
    let string = |text: &str| Value::String(text.to_owned());
    keys.extend([
        ("tokenizer.ggml.model", string("gemma4")),
        ("tokenizer.ggml.pre", string("gemma4")),
        ("tokenizer.ggml.eos_token_id", Value::U32(1)),
        ("tokenizer.ggml.bos_token_id", Value::U32(2)),
        ("tokenizer.ggml.add_bos_token", Value::Bool(false)),
    ]);
    keys
}
