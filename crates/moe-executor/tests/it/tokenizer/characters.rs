//! Vocabularies with merges of characters, lists of merges that may be missing, and files without a vocabulary.

use moe_executor::tokenizer::{Error, Model, Role, Tokenizer, Vocabulary};
use moe_gguf::{Gguf, Value};
use moe_synth::write::Header;
use moe_testkit::fixture;

use super::{error, with_key};

const BOS: u32 = 1;

/// A vocabulary like Gemma 4's.
fn gemma4() -> Vocabulary {
    let texts = [
        ("<pad>", 3),
        ("<bos>", 3),
        ("</s>", 1),
        ("<|tool_response>", 4),
        ("▁", 1),
        ("a", 1),
        ("b", 1),
        ("ab", 1),
        ("▁ab", 1),
        ("\n", 1),
        ("\n\n", 1),
        ("<0xC3>", 6),
        ("<0xA4>", 6),
    ];
    Vocabulary {
        model: Model::Gemma4,
        tokens: texts.iter().map(|(text, _)| (*text).to_owned()).collect(),
        token_types: texts.iter().map(|(_, ty)| *ty).collect(),
        merges: ["a b", "▁ ab"].map(String::from).to_vec(),
        roles: [(Role::Bos, BOS)].into(),
        ..Vocabulary::default()
    }
}

#[test]
fn merges_characters_and_encodes_others_as_byte_tokens() {
    let tokenizer = Tokenizer::new(gemma4()).unwrap();
    let encode = |text: &str| tokenizer.encode(text, false, false).unwrap();
    assert_eq!(encode("ab ab"), [7, 8]);
    // A run of line feeds is a token without merges; another run has none.
    assert_eq!(encode("a\n\nb\n\n\n"), [5, 10, 6, 9, 9, 9]);
    // The bytes of U+1F600 have no tokens.
    assert_eq!(encode("ä\u{1F600}b"), [11, 12, 6]);
    assert_eq!(tokenizer.decode(&encode(" ab\n\nä")), " ab\n\nä");
    assert_eq!(tokenizer.piece(8), b" ab");
    assert_eq!(tokenizer.piece(11), b"\xC3");
}

/// llama.cpp overrides the key for Gemma 4.
#[test]
fn gemma4_texts_always_start_with_bos() {
    let mut vocabulary = gemma4();
    vocabulary.add_bos = Some(false);
    let tokenizer = Tokenizer::new(vocabulary.clone()).unwrap();
    assert_eq!(tokenizer.encode("a", true, false).unwrap(), [BOS, 5]);
    vocabulary.roles.clear();
    let missing = error(vocabulary);
    assert!(
        matches!(
            missing,
            Error::MissingKey {
                key: "tokenizer.ggml.bos_token_id",
                ..
            }
        ),
        "{missing}"
    );
}

#[test]
fn end_of_sentence_is_text_in_gemma4() {
    let tokenizer = Tokenizer::new(gemma4()).unwrap();
    let ends: Vec<u32> = (0..13).filter(|&id| tokenizer.is_eog(id)).collect();
    assert_eq!(ends, [3]);
    // The characters have no tokens.
    assert!(tokenizer.encode("</s>", false, true).unwrap().is_empty());
    let mut other = gemma4();
    other.tokens[3] = "<other>".to_owned();
    let tokenizer = Tokenizer::new(other).unwrap();
    assert!(tokenizer.is_eog(2));
    assert_eq!(tokenizer.encode("</s>", false, true).unwrap(), [2]);
}

/// The tokenizer of a fixture with another pre-tokenizer and without merges.
fn without_merges(pre: &str) -> Result<Tokenizer, Error> {
    const KEYS: [&str; 2] = ["tokenizer.ggml.merges", "tokenizer.ggml.pre"];
    let gguf = Gguf::open(fixture("tiny-qwen3moe-Q4_K_M.gguf")).unwrap();
    let mut header = Header::like(&gguf, |key| KEYS.contains(&key)).unwrap();
    header.set(KEYS[1], &Value::String(pre.to_owned())).unwrap();
    let bytes = header.encode().unwrap().leak();
    Tokenizer::from_gguf(Gguf::from_static("changed", bytes).unwrap().metadata())
}

#[test]
fn only_kimi_k2_needs_no_merges() {
    let tokenizer = without_merges("kimi-k2").unwrap();
    let tokens = tokenizer.encode("ab é", false, false).unwrap();
    assert_eq!(tokens.len(), 5);
    assert_eq!(tokenizer.decode(&tokens), "ab é");
    let missing = without_merges("qwen2").err().unwrap();
    assert!(
        matches!(
            missing,
            Error::MissingKey {
                key: "tokenizer.ggml.merges",
                ..
            }
        ),
        "{missing}"
    );
}

#[test]
fn file_without_vocabulary_has_no_texts() {
    for name in ["none", "no_vocab"] {
        let name = Some(Value::String(name.to_owned()));
        let model = "tiny-qwen3moe-Q4_K_M.gguf";
        let tokenizer = with_key(model, "tokenizer.ggml.model", name).unwrap();
        assert!(!tokenizer.has_vocabulary());
        assert_eq!((tokenizer.n_vocab(), tokenizer.bos()), (0, None));
        assert!(tokenizer.piece(0).is_empty());
        assert_eq!(tokenizer.decode(&[1, 2]), "");
        assert!(!tokenizer.is_eog(0));
        let error = tokenizer.encode("a", true, true).unwrap_err();
        assert!(matches!(error, Error::NoVocabulary), "{error}");
    }
}
