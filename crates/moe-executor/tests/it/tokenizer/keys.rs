//! Missing, empty and unsupported keys of a tokenizer.

use moe_executor::tokenizer::Error;

use super::{is_wrong_type, with_key};

#[test]
fn rejects_missing_and_unsupported_keys() {
    let with_key = |key: &str, value| with_key("tiny-qwen3moe-Q4_K_M.gguf", key, value);
    let string = |text: &str| Some(moe_gguf::Value::String(text.to_owned()));
    let error = |key: &str, value| with_key(key, value).err().expect("an error");
    let kind = error("tokenizer.ggml.model", string("bert"));
    assert!(
        matches!(&kind, Error::Model { found } if found == "bert"),
        "{kind}"
    );
    for key in ["model", "tokens", "merges"] {
        let name = format!("tokenizer.ggml.{key}");
        let error = error(&name, None);
        assert!(
            matches!(&error, Error::MissingKey { key, .. } if *key == name),
            "{error}"
        );
    }
    const TOKENS: &str = "tokenizer.ggml.tokens";
    let wrong_type = error(TOKENS, Some(moe_gguf::Value::U32(1)));
    assert!(is_wrong_type(&wrong_type, TOKENS), "{wrong_type}");
    assert!(with_key("tokenizer.ggml.token_type", None).is_ok());
    assert!(with_key("tokenizer.ggml.pre", string("gpt-4o")).is_ok());
    assert!(with_key("tokenizer.ggml.pre", None).is_ok());
    // Only a missing list means that all tokens are normal.
    let none = moe_gguf::Array::new(moe_gguf::ValueType::I32, std::iter::empty()).unwrap();
    let no_types = error(
        "tokenizer.ggml.token_type",
        Some(moe_gguf::Value::Array(Box::new(none))),
    );
    assert!(
        matches!(
            no_types,
            Error::TokenTypes {
                types: 0,
                tokens: 4096
            }
        ),
        "{no_types}"
    );
}

#[test]
fn rejects_an_empty_list_of_scores() {
    let none = moe_gguf::Array::new(moe_gguf::ValueType::F32, std::iter::empty()).unwrap();
    let none = moe_gguf::Value::Array(Box::new(none));
    let error = with_key("random-llama-F16.gguf", "tokenizer.ggml.scores", Some(none));
    let error = error.err().expect("an error");
    assert!(
        matches!(
            error,
            Error::Scores {
                scores: 0,
                tokens: 2048
            }
        ),
        "{error}"
    );
}

#[test]
fn empty_name_of_a_pre_tokenizer_is_a_missing_name() {
    let encode = |pre| {
        let tokenizer = with_key("tiny-qwen3moe-Q4_K_M.gguf", "tokenizer.ggml.pre", pre);
        let text = "It's 2026: 12345 words\n\n  of code";
        tokenizer.unwrap().encode(text, true, true).unwrap()
    };
    assert_eq!(
        encode(Some(moe_gguf::Value::String(String::new()))),
        encode(None)
    );
}
