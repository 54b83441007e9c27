//! Both tokenizers return the same tokens for all vocabularies and pre-tokenizers.

mod pairs;

use std::collections::BTreeSet;
use std::path::Path;

use moe_executor::tokenizer::{Tokenizer, pre_tokenizers};
use moe_gguf::{Array, Gguf, Value, ValueType};
use moe_llama_cpp::{Error, Model};

use crate::compare::some_tokens;
use crate::models::{changed, fixture, make, n_vocab, small};

/// Texts with difficult parts, and random concatenations of such parts.
fn texts() -> Vec<String> {
    let cases = moe_testkit::reference::read("tokenization");
    let cases: serde_json::Value = serde_json::from_slice(&cases).unwrap();
    let cases = cases.as_array().unwrap().iter();
    let mut texts: BTreeSet<String> = cases
        .map(|case| case["text"].as_str().unwrap().to_owned())
        .collect();
    const PIECES: [&str; 64] = [
        "a",
        "The",
        "kernel",
        "ing",
        "HTTP",
        "x",
        "'s",
        "'LL",
        "’t",
        " ",
        "  ",
        "\n",
        "\r\n",
        "\t",
        "0",
        "12",
        "1234567",
        "½",
        "٣",
        ".",
        "...",
        "!?",
        "//",
        "_",
        "-",
        "(",
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<s>",
        "é",
        "É",
        "e\u{301}",
        "ß",
        "ж",
        "Ж",
        "日本",
        "語",
        "한",
        "न",
        "मस्ते",
        "😀",
        "👩‍🔬",
        "\u{a0}",
        "\u{3000}",
        "\u{200b}",
        "\u{feff}",
        "\u{1c}",
        "▁",
        "=",
        "。",
        "，",
        "、",
        "เก",
        "가",
        "〇",
        "\u{fa6e}",
        "ſ",
        "'re",
        "\u{301}",
        "\u{1680}",
        "\u{2028}",
        "</s>",
        "$",
    ];
    for seed in 0..400 {
        let n = 2 + seed as usize % 14;
        let pieces = some_tokens(n, PIECES.len() as u32, seed);
        texts.insert(pieces.iter().map(|&i| PIECES[i as usize]).collect());
    }
    texts.into_iter().collect()
}

fn agree(path: &Path, texts: &[String]) {
    let gguf = Gguf::open(path).unwrap();
    let ours = Tokenizer::from_gguf(gguf.metadata()).unwrap();
    let theirs = Model::load(&gguf).unwrap();
    let file = path.file_name().unwrap().display();
    assert_eq!(ours.n_vocab(), theirs.n_vocab(), "{file}");
    for text in texts {
        for (add_special, parse_special) in [(true, true), (false, false)] {
            let a = ours.encode(text, add_special, parse_special).unwrap();
            let b = theirs.tokenize(text, add_special, parse_special).unwrap();
            assert_eq!(a, b, "{file}: {text:?}, special {add_special}");
        }
    }
    for token in 0..ours.n_vocab() as u32 {
        assert_eq!(ours.piece(token), theirs.piece(token), "{file}: {token}");
        assert_eq!(ours.is_eog(token), theirs.is_eog(token), "{file}: {token}");
    }
}

#[test]
fn agree_on_vocabularies_of_fixtures() {
    let texts = texts();
    for model in ["gpt-oss", "llama", "olmoe", "qwen2moe", "qwen3moe"] {
        agree(&fixture(format!("random-{model}-F16.gguf")), &texts);
    }
}

/// Number of tokens of the model whose vocabulary is replaced.
fn n_pairs() -> usize {
    let gguf = Gguf::open(fixture("random-qwen2moe-F16.gguf")).unwrap();
    n_vocab(&gguf) as usize
}

#[test]
fn agree_on_all_pre_tokenizers() {
    let (dir, texts) = (tempfile::tempdir().unwrap(), texts());
    let keys = pairs::of_bytes(n_pairs(), &texts);
    for names in pre_tokenizers() {
        for (i, name) in names.iter().enumerate() {
            let mut keys = keys.clone();
            keys.push(("tokenizer.ggml.pre", Value::String((*name).to_owned())));
            // The other names have the same words.
            let n_texts = if i == 0 { texts.len() } else { 30 };
            let path = changed(dir.path(), "random-qwen2moe-F16", &keys);
            agree(&path, &texts[..n_texts]);
        }
    }
}

#[test]
fn agree_on_vocabularies_of_characters() {
    let (dir, mut texts) = (tempfile::tempdir().unwrap(), texts());
    // llama.cpp reads the tokens of a vocabulary as C strings.
    texts.retain(|text| !text.contains('\0'));
    let keys = pairs::of_characters(n_pairs(), &texts);
    agree(&changed(dir.path(), "random-qwen2moe-F16", &keys), &texts);
}

#[test]
fn agree_on_files_without_vocabulary() {
    let dir = tempfile::tempdir().unwrap();
    let n_rows = u32::try_from(n_pairs()).unwrap();
    for name in ["none", "no_vocab"] {
        let keys = [
            ("tokenizer.ggml.model", Value::String(name.to_owned())),
            ("qwen2moe.vocab_size", Value::U32(n_rows)),
        ];
        let path = changed(dir.path(), "random-qwen2moe-F16", &keys);
        let gguf = Gguf::open(path).unwrap();
        let ours = moe_executor::Model::load(&gguf).unwrap();
        let theirs = Model::load(&gguf).unwrap();
        assert_eq!(theirs.n_vocab(), n_rows as usize);
        assert_eq!(ours.hparams().n_vocab, theirs.n_vocab());
        for token in [0, 1, n_rows - 1, n_rows] {
            assert_eq!(ours.tokenizer().piece(token), theirs.piece(token));
            assert_eq!(ours.tokenizer().is_eog(token), theirs.is_eog(token));
        }
        let error = theirs.tokenize("a", true, true).unwrap_err();
        assert!(matches!(error, Error::NoVocabulary), "{error}");
        assert!(ours.tokenizer().encode("a", true, true).is_err());
    }
}

#[test]
fn agree_on_sentencepiece_without_space_prefix() {
    let dir = tempfile::tempdir().unwrap();
    let key = ("tokenizer.ggml.add_space_prefix", Value::Bool(false));
    let path = changed(dir.path(), "random-llama-F16", &[key]);
    agree(&path, &texts());
}

/// llama.cpp removes whitespace after special tokens in models with such a name.
#[test]
fn agree_on_whitespace_after_special_tokens() {
    let dir = tempfile::tempdir().unwrap();
    let gguf = Gguf::open(fixture("random-llama-F16.gguf")).unwrap();
    let tokens = gguf.metadata().strings("tokenizer.ggml.tokens").unwrap();
    let mut tokens = tokens.unwrap().to_vec();
    let types = gguf.metadata().i64s("tokenizer.ggml.token_type").unwrap();
    let mut types = types.unwrap();
    let last = tokens.len() - 1;
    for (at, text) in [(last - 1, "<|end|>"), (last, "<|endoftext|>")] {
        tokens[at] = text.to_owned();
        types[at] = 3;
    }
    let tokens = Array::new(ValueType::String, tokens.into_iter().map(Value::String)).unwrap();
    let types = types
        .iter()
        .map(|&ty| Value::I32(i32::try_from(ty).unwrap()));
    let types = Array::new(ValueType::I32, types).unwrap();
    let keys = [
        ("tokenizer.ggml.tokens", Value::Array(Box::new(tokens))),
        ("tokenizer.ggml.token_type", Value::Array(Box::new(types))),
        ("general.name", Value::String("Phi-3.5-MoE".to_owned())),
    ];
    let path = changed(dir.path(), "random-llama-F16", &keys);
    let mut texts = texts();
    for special in ["<s>", "</s>", "<unk>", "<|end|>", "<|endoftext|>"] {
        texts.push(format!("a{special} \n\t b{special}\u{a0}c{special}  "));
    }
    agree(&path, &texts);
}

/// The text of a rendered conversation, with markers of turns that are control tokens.
#[test]
fn agree_on_conversations() {
    let dir = tempfile::tempdir().unwrap();
    let gguf = Gguf::open(fixture("random-qwen3moe-F16.gguf")).unwrap();
    let mut tokens = gguf
        .metadata()
        .strings("tokenizer.ggml.tokens")
        .unwrap()
        .unwrap()
        .to_vec();
    let mut types = vec![1; tokens.len()];
    let last = tokens.len() - 2;
    for (at, text) in [
        (0, "<|endoftext|>"),
        (last, "<|im_start|>"),
        (last + 1, "<|im_end|>"),
    ] {
        tokens[at] = text.to_owned();
        types[at] = 3;
    }
    let tokens = Array::new(ValueType::String, tokens.into_iter().map(Value::String)).unwrap();
    let types = Array::new(ValueType::I32, types.into_iter().map(Value::I32)).unwrap();
    let keys = [
        ("tokenizer.ggml.tokens", Value::Array(Box::new(tokens))),
        ("tokenizer.ggml.token_type", Value::Array(Box::new(types))),
    ];
    let path = changed(dir.path(), "random-qwen3moe-F16", &keys);
    let text = "<|im_start|>user\nhi <|im_end|> there<|im_end|>\n<|im_start|>assistant\n";
    agree(&path, &[text.to_owned()]);
    let gguf = Gguf::open(&path).unwrap();
    let ours = Tokenizer::from_gguf(gguf.metadata()).unwrap();
    let tokens = ours.encode(text, true, true).unwrap();
    let markers = |id| tokens.iter().filter(|&&token| token as usize == id).count();
    assert_eq!((markers(last), markers(last + 1)), (2, 2));
}

#[test]
fn agree_on_synthetic_vocabularies() {
    let (dir, texts) = (tempfile::tempdir().unwrap(), texts());
    for like in [
        "gpt-oss-20b",
        "mixtral-8x7b",
        "olmoe-1b-7b",
        "qwen3-30b-a3b",
    ] {
        agree(&make(dir.path(), like, &small(like, "F16")), &texts);
    }
}
