//! The tokenizer compared with llama.cpp (`fixtures/reference`), and invalid vocabularies.

mod characters;
mod keys;
mod sentencepiece;

use std::collections::HashMap;

use moe_executor::tokenizer::{Error, Role, Tokenizer, Vocabulary, Warning};
use moe_gguf::Gguf;
use moe_synth::write;
use moe_testkit::fixture;
use serde_json::Value;

fn json(name: &str) -> Value {
    serde_json::from_slice(&moe_testkit::reference::read(name)).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    let id = |v: &Value| u32::try_from(v.as_u64().unwrap()).unwrap();
    value.as_array().unwrap().iter().map(id).collect()
}

/// Tokenizers by model, loaded on first use.
#[derive(Default)]
struct Tokenizers(HashMap<String, Tokenizer>);

impl Tokenizers {
    fn of(&mut self, model: &str) -> &Tokenizer {
        self.0.entry(model.to_owned()).or_insert_with(|| {
            let gguf = Gguf::open(fixture(model)).unwrap();
            Tokenizer::from_gguf(gguf.metadata()).unwrap()
        })
    }
}

/// Encodes and decodes the text of a reference.
fn check(tokenizer: &Tokenizer, case: &Value) {
    let text = case["text"].as_str().unwrap();
    let flag = |name: &str| case[name].as_bool().unwrap();
    let tokens = tokenizer
        .encode(text, flag("add_special"), flag("parse_special"))
        .unwrap();
    assert_eq!(tokens, ids(&case["tokens"]), "{text:?} with {case}");
    assert_eq!(tokenizer.decode(&tokens), case["detokenized"], "{text:?}");
}

#[test]
fn byte_level_vocabularies_agree_with_llama_cpp() {
    let mut tokenizers = Tokenizers::default();
    let cases = json("tokenization");
    let cases = cases.as_array().unwrap();
    assert_eq!(cases.len(), 398);
    for case in cases {
        check(tokenizers.of(case["model"].as_str().unwrap()), case);
    }
}

#[test]
fn sentencepiece_vocabularies_agree_with_llama_cpp() {
    let prefixed = with_key("random-llama-F16.gguf", "", None).unwrap();
    let disabled = Some(moe_gguf::Value::Bool(false));
    let plain = with_key(
        "random-llama-F16.gguf",
        "tokenizer.ggml.add_space_prefix",
        disabled,
    )
    .unwrap();
    let cases = json("tokenization-llama");
    let (mut n_prefixed, mut n_plain) = (0, 0);
    for case in cases.as_array().unwrap() {
        match case.get("add_space_prefix") {
            Some(_) => {
                check(&plain, case);
                n_plain += 1;
            }
            None => {
                check(&prefixed, case);
                n_prefixed += 1;
            }
        }
    }
    assert_eq!((n_prefixed, n_plain), (323, 40));
}

#[test]
fn prompts_and_generated_texts_agree_with_llama_cpp() {
    let mut tokenizers = Tokenizers::default();
    let mut runs = 0;
    for name in moe_testkit::reference::names() {
        let run = json(&name);
        let Some(prompt) = run.get("prompt").and_then(Value::as_str) else {
            continue;
        };
        let tokenizer = tokenizers.of(run["model"].as_str().unwrap());
        assert_eq!(
            tokenizer.encode(prompt, true, true).unwrap(),
            ids(&run["prompt_tokens"]),
            "{prompt:?}"
        );
        let generated = ids(&run["generated_tokens"]);
        assert_eq!(tokenizer.decode(&generated), run["text"], "{prompt:?}");
        runs += 1;
    }
    assert!(runs >= 16, "only {runs} runs in fixtures/reference");
}

#[test]
fn special_tokens_of_a_model() {
    let mut tokenizers = Tokenizers::default();
    let tokenizer = tokenizers.of("tiny-qwen3moe-Q4_K_M.gguf");
    assert_eq!(tokenizer.n_vocab(), 4096);
    assert_eq!((tokenizer.bos(), tokenizer.eos()), (Some(0), Some(0)));
    assert!(tokenizer.is_eog(0));
    assert!(!tokenizer.is_eog(1));
    assert!(!tokenizer.is_eog(4096));
    assert_eq!(tokenizer.piece(0), b"<|endoftext|>");
    assert_eq!(tokenizer.piece(4096), b"");
    assert_eq!(tokenizer.decode(&[u32::MAX]), "");
}

/// The tokenizer of a model with the key `key` replaced or removed.
fn with_key(model: &str, key: &str, value: Option<moe_gguf::Value>) -> Result<Tokenizer, Error> {
    let gguf = Gguf::open(fixture(model)).unwrap();
    let mut header = write::Header::like(&gguf, |k| k == key).unwrap();
    if let Some(value) = value {
        header.set(key, &value).unwrap();
    }
    let bytes = header.encode().unwrap().leak();
    Tokenizer::from_gguf(Gguf::from_static("changed", bytes).unwrap().metadata())
}

/// Whether a key has the wrong type.
fn is_wrong_type(error: &Error, name: &str) -> bool {
    matches!(error, Error::Metadata(moe_gguf::Error::WrongType { key, .. }) if key == name)
}

/// A small vocabulary: one token per byte, then `extra` tokens, and a few merges.
fn vocabulary(extra: &[&str], merges: &[&str]) -> Vocabulary {
    // GPT-2's alphabet, in the order of the characters.
    let printable = (0x21..=0x7E).chain(0xA1..=0xAC).chain(0xAE..=0xFF);
    let alphabet = printable.chain(0x100..=0x143).filter_map(char::from_u32);
    Vocabulary {
        tokens: alphabet
            .map(String::from)
            .chain(extra.iter().map(|text| text.to_string()))
            .collect(),
        merges: merges.iter().map(|merge| merge.to_string()).collect(),
        pre: Some("qwen2".to_owned()),
        ..Vocabulary::default()
    }
}

/// The pieces of `text`, separated by bars.
fn pieces(vocabulary: Vocabulary, text: &str, parse_special: bool) -> String {
    let tokenizer = Tokenizer::new(vocabulary).unwrap();
    let tokens = tokenizer.encode(text, true, parse_special).unwrap();
    let pieces: Vec<_> = tokens.iter().map(|&id| tokenizer.decode(&[id])).collect();
    pieces.join("|")
}

fn error(vocabulary: Vocabulary) -> Error {
    let error = Tokenizer::new(vocabulary).err().expect("an error");
    assert!(!error.to_string().contains('\n'), "{error}");
    error
}

#[test]
fn merges_by_rank_then_leftmost() {
    let merged = vocabulary(&["ab", "bc", "aba"], &["b c", "a b", "ab a"]);
    assert_eq!(pieces(merged.clone(), "abc", false), "a|bc");
    assert_eq!(pieces(merged, "ababa", false), "ab|aba");
    let pairs = vocabulary(&["aa"], &["a a"]);
    assert_eq!(pieces(pairs, "aaa", false), "aa|a");
    // A repeated pair keeps its first rank.
    let again = vocabulary(&["ab", "bc"], &["b c", "a b", "b c"]);
    assert_eq!(pieces(again, "abc", false), "a|bc");
}

#[test]
fn ignore_merges_keeps_words_that_are_tokens() {
    let mut whole = vocabulary(&["ab", "abc", "<s>"], &["a b"]);
    assert_eq!(pieces(whole.clone(), "abc", false), "ab|c");
    whole.pre = Some("llama-bpe".to_owned());
    whole.roles.insert(Role::Bos, 258);
    assert_eq!(pieces(whole.clone(), "abc", false), "<s>|abc");
    whole.add_bos = Some(false);
    assert_eq!(pieces(whole, "abc", false), "abc");
}

#[test]
fn skips_a_byte_without_token_and_does_not_merge_across_it() {
    let mut gap = vocabulary(&["ab"], &["a b"]);
    let x = gap.tokens.iter().position(|text| text == "x").unwrap();
    gap.tokens[x] = "xx".to_owned();
    assert_eq!(pieces(gap.clone(), "axb", false), "a|b");
    assert_eq!(pieces(gap, "ab", false), "ab");
}

#[test]
fn finds_special_tokens_longest_first() {
    let mut special = vocabulary(&["<a>", "<a><b>", "<c>", "<u>"], &[]);
    special.token_types = vec![1; 256];
    special.token_types.extend([3, 3, 2, 4]);
    assert_eq!(
        pieces(special.clone(), "<a><a><b>x<c><u>", true),
        "<a>|<a><b>|x|<c>|<u>"
    );
    // Without `parse_special`, only user-defined tokens are found.
    assert_eq!(pieces(special, "<a>x<c><u>", false), "<|a|>|x|<|c|>|<u>");
}

#[test]
fn adds_bos_and_eos_with_add_special() {
    let mut both = vocabulary(&["<s>", "<e>"], &[]);
    both.roles = HashMap::from([(Role::Bos, 256), (Role::Eos, 257)]);
    both.add_bos = Some(true);
    both.add_eos = Some(true);
    let tokenizer = Tokenizer::new(both).unwrap();
    assert_eq!(tokenizer.encode("", true, false).unwrap(), [256, 257]);
    assert!(tokenizer.encode("", false, false).unwrap().is_empty());
    assert!(tokenizer.is_eog(257) && !tokenizer.is_eog(256));
}

#[test]
fn well_known_texts_are_special_for_any_type() {
    let texts = ["<|im_end|>", "<|fim_prefix|>", "<|repo_name|>", "<|start|>"];
    let mut known = vocabulary(&texts, &[]);
    known.token_types = vec![1; 256];
    known.token_types.extend([4, 4, 1, 3]);
    let tokenizer = Tokenizer::new(known).unwrap();
    let ends: Vec<u32> = (0..260).filter(|&id| tokenizer.is_eog(id)).collect();
    // 11 is llama.cpp's default EOS.
    assert_eq!(ends, [11, 256, 258]);
    for (id, text) in (256..).zip(texts) {
        assert_eq!(tokenizer.encode(text, false, true).unwrap(), [id]);
        let found = tokenizer.encode(text, false, false).unwrap() == [id];
        assert_eq!(found, text == "<|start|>", "{text}");
    }
}

#[test]
fn end_of_message_of_harmony_does_not_end_generation() {
    let plain = Tokenizer::new(vocabulary(&["<|end|>"], &[])).unwrap();
    assert!(plain.is_eog(256));
    let harmony = vocabulary(&["<|end|>", "<|return|>", "<|call|>"], &[]);
    let harmony = Tokenizer::new(harmony).unwrap();
    assert!(!harmony.is_eog(256) && harmony.is_eog(257) && harmony.is_eog(258));
    assert_eq!(harmony.encode("<|end|>", false, false).unwrap(), [256]);
}

#[test]
fn pieces_of_byte_empty_and_unused_tokens() {
    let mut odd = vocabulary(&["<0x0A>", "", "unused", "Ġ▁"], &[]);
    odd.token_types = vec![1; 256];
    odd.token_types.extend([6, 1, 5, 1]);
    let tokenizer = Tokenizer::new(odd).unwrap();
    assert_eq!(tokenizer.piece(256), b"\n");
    assert_eq!(tokenizer.piece(257), b"[EMPTY_257]");
    assert_eq!(tokenizer.piece(258), b"");
    assert_eq!(tokenizer.piece(259), " ▁".as_bytes());
    // One byte of a character, and both bytes.
    let halves = tokenizer.encode("é", false, false).unwrap();
    assert_eq!(halves.len(), 2);
    assert_eq!(tokenizer.decode(&halves[..1]), "\u{FFFD}");
    assert_eq!(tokenizer.decode(&halves), "é");
}

/// llama.cpp does not require that the result of a merge is a token: `ab` is not a token, but a step to `abc`.
#[test]
fn results_of_merges_need_not_be_tokens() {
    let step = vocabulary(&["abc"], &["a b", "ab c"]);
    let tokenizer = Tokenizer::new(step.clone()).unwrap();
    assert_eq!(
        tokenizer.warnings(),
        [Warning::Merges {
            count: 2,
            index: 0,
            merge: "a b".into()
        }]
    );
    assert_eq!(pieces(step.clone(), "abc", false), "abc");
    // A part without a token is encoded as single characters.
    assert_eq!(pieces(step, "abd", false), "a|b|d");
    // Characters outside ASCII, like `Ġ`, are skipped.
    let spaced = vocabulary(&[], &["Ġ a"]);
    assert_eq!(pieces(spaced, " ab", false), "a|b");
}

#[test]
fn warns_about_malformed_merges() {
    for merge in ["", " ", "ab", "a ", " b", "ab zz", "é", "a b c"] {
        let merged = vocabulary(&["ab"], &["a b", merge, merge]);
        assert_eq!(pieces(merged.clone(), "aab", false), "a|ab", "{merge:?}");
        let tokenizer = Tokenizer::new(merged).unwrap();
        let expected = Warning::Merges {
            count: 2,
            index: 1,
            merge: merge.to_owned(),
        };
        assert_eq!(tokenizer.warnings(), [expected]);
    }
    let fine = Tokenizer::new(vocabulary(&["ab"], &["a b"])).unwrap();
    assert_eq!(fine.warnings(), []);
}

/// llama.cpp: "bad special token, using default id".
#[test]
fn warns_about_special_ids_outside_the_vocabulary() {
    let u32 = |id: u32| Some(moe_gguf::Value::U32(id));
    for (model, key, used) in [
        ("tiny-qwen3moe-Q4_K_M", "eos_token_id", Some(11)),
        ("tiny-qwen3moe-Q4_K_M", "bos_token_id", Some(11)),
        ("tiny-qwen3moe-Q4_K_M", "eot_token_id", None),
        ("tiny-qwen3moe-Q4_K_M", "eom_token_id", None),
        ("tiny-qwen3moe-Q4_K_M", "unknown_token_id", None),
        ("tiny-qwen3moe-Q4_K_M", "padding_token_id", None),
        ("tiny-qwen3moe-Q4_K_M", "seperator_token_id", None),
        ("tiny-qwen3moe-Q4_K_M", "mask_token_id", None),
        ("tiny-qwen3moe-Q4_K_M", "fim_pre_token_id", None),
        ("tiny-qwen3moe-Q4_K_M", "fim_sep_token_id", None),
        ("random-llama-F16", "eos_token_id", Some(2)),
        ("random-llama-F16", "bos_token_id", Some(1)),
    ] {
        let key = format!("tokenizer.ggml.{key}");
        let model = format!("{model}.gguf");
        for bad in [4096, u32::MAX] {
            let tokenizer = with_key(&model, &key, u32(bad)).unwrap();
            let [
                Warning::SpecialId {
                    key: of,
                    id,
                    used: default,
                    ..
                },
            ] = tokenizer.warnings()
            else {
                panic!("{key}: {:?}", tokenizer.warnings());
            };
            assert_eq!((*of, *id, *default), (&*key, i128::from(bad), used));
            if key.ends_with("eos_token_id") {
                assert_eq!(tokenizer.eos(), used);
                assert!(tokenizer.is_eog(used.unwrap()));
            }
        }
        assert_eq!(with_key(&model, &key, u32(5)).unwrap().warnings(), []);
    }
    // Some converters write -1 for a token that does not exist.
    let none = Some(moe_gguf::Value::I32(-1));
    let tokenizer = with_key(
        "tiny-qwen3moe-Q4_K_M.gguf",
        "tokenizer.ggml.eos_token_id",
        none,
    );
    assert_eq!(tokenizer.unwrap().warnings().len(), 1);
    let text = Some(moe_gguf::Value::String("</s>".into()));
    const EOS: &str = "tokenizer.ggml.eos_token_id";
    let wrong = with_key("tiny-qwen3moe-Q4_K_M.gguf", EOS, text);
    let wrong = wrong.err().unwrap();
    assert!(is_wrong_type(&wrong, EOS), "{wrong}");

    let mut range = vocabulary(&[], &[]);
    range.roles.insert(Role::Eos, 256);
    let tokenizer = Tokenizer::new(range).unwrap();
    let expected = Warning::SpecialId {
        key: EOS,
        id: 256,
        n_vocab: 256,
        used: Some(11),
    };
    assert_eq!(tokenizer.warnings(), [expected]);
    assert_eq!(tokenizer.eos(), Some(11));
}

#[test]
fn default_ids_agree_with_llama_cpp() {
    let tokenizer = Tokenizer::new(vocabulary(&[], &[])).unwrap();
    assert_eq!((tokenizer.bos(), tokenizer.eos()), (Some(11), Some(11)));
    let mut glm = vocabulary(&[], &[]);
    glm.pre = Some("glm4".into());
    let tokenizer = Tokenizer::new(glm).unwrap();
    assert_eq!((tokenizer.bos(), tokenizer.eos()), (None, Some(11)));
    let mut small = vocabulary(&[], &[]);
    small.tokens.truncate(11);
    let tokenizer = Tokenizer::new(small).unwrap();
    assert_eq!((tokenizer.bos(), tokenizer.eos()), (None, None));
}

#[test]
fn rejects_invalid_vocabularies() {
    let error_is = |vocabulary, is_expected: &dyn Fn(&Error) -> bool| {
        let error = error(vocabulary);
        assert!(is_expected(&error), "{error}");
    };
    error_is(
        vocabulary(&["ab", "x", "ab"], &[]),
        &|error| matches!(error, Error::DuplicateToken { first: 87, second: 257, text } if text == "x"),
    );

    let mut types = vocabulary(&[], &[]);
    types.token_types = vec![1; 255];
    error_is(types, &|error| {
        matches!(
            error,
            Error::TokenTypes {
                types: 255,
                tokens: 256
            }
        )
    });

    let mut byte = vocabulary(&["<0xZZ>"], &[]);
    byte.token_types = vec![1; 256];
    byte.token_types.push(6);
    error_is(
        byte,
        &|error| matches!(error, Error::ByteToken { id: 256, text } if text == "<0xZZ>"),
    );

    let mut bos = vocabulary(&[], &[]);
    bos.pre = Some("glm4".into());
    bos.add_bos = Some(true);
    error_is(bos, &|error| {
        matches!(
            error,
            Error::MissingKey {
                key: "tokenizer.ggml.bos_token_id",
                ..
            }
        )
    });

    let mut pre = vocabulary(&[], &[]);
    pre.pre = Some("unknown".to_owned());
    error_is(pre, &|error| {
        matches!(error, Error::PreTokenizer { found, supported }
            if found == "unknown" && supported.starts_with("qwen2"))
    });

    let empty = Tokenizer::new(Vocabulary::default()).unwrap();
    assert!(empty.encode("text", true, true).unwrap().is_empty());
    assert_eq!(empty.n_vocab(), 0);
}
