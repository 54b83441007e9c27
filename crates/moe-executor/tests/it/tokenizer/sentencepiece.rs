//! SentencePiece vocabularies: merges by score, byte tokens, scores.

use moe_executor::tokenizer::{Error, Model, Tokenizer, Vocabulary};

use super::{error, pieces, with_key};

/// A SentencePiece vocabulary: special tokens, one token per byte, then pieces with scores.
fn pieces_with_scores(scored: &[(&str, f32)]) -> Vocabulary {
    let special = ["<unk>", "<s>", "</s>"].map(String::from);
    let bytes = (0..=255).map(|byte| format!("<0x{byte:02X}>"));
    let mut vocabulary = Vocabulary {
        model: Model::Spm,
        tokens: special.into_iter().chain(bytes).collect(),
        token_types: [2, 3, 3].into_iter().chain([6; 256]).collect(),
        scores: vec![0.0; 259],
        ..Vocabulary::default()
    };
    for (text, score) in scored {
        vocabulary.tokens.push((*text).to_owned());
        vocabulary.token_types.push(1);
        vocabulary.scores.push(*score);
    }
    vocabulary
}

/// llama.cpp uses the first entries of longer lists, and accepts integers as scores.
#[test]
fn accepts_longer_lists_and_integer_scores() {
    let mut longer = pieces_with_scores(&[("ab", -1.0), ("bc", -2.0), ("▁", -3.0)]);
    longer.scores.push(0.0);
    longer.token_types.push(1);
    assert_eq!(pieces(longer, "abc", false), "<s>||ab|c");
    let key = "tokenizer.ggml.scores";
    let scores = moe_gguf::Array::new(
        moe_gguf::ValueType::I32,
        (0..4096).map(moe_gguf::Value::I32),
    );
    let scores = moe_gguf::Value::Array(Box::new(scores.unwrap()));
    assert!(with_key("random-llama-F16.gguf", key, Some(scores)).is_ok());
}

#[test]
fn merges_by_score_then_leftmost() {
    let scored = pieces_with_scores(&[("ab", -2.0), ("bc", -1.0), ("▁a", -3.0)]);
    assert_eq!(pieces(scored, "abc", false), "<s>|a|bc");
    // 0.0 and -0.0 are equal scores.
    let equal = pieces_with_scores(&[("ab", -0.0), ("bc", 0.0), ("▁", -9.0)]);
    assert_eq!(pieces(equal, "abc", false), "<s>||ab|c");
    // A queued pair is dropped after one of its parts was merged.
    let grown = pieces_with_scores(&[("aa", -1.0), ("aaa", -2.0), ("aaaa", -3.0)]);
    assert_eq!(
        pieces(grown, "aaaaa", false),
        "<s>|\u{FFFD}|\u{FFFD}|\u{FFFD}|aa|aaa"
    );
}

#[test]
fn encodes_text_without_pieces_as_byte_tokens() {
    let mut spelled = pieces_with_scores(&[("▁x", 0.0), ("▁", 0.0), ("x", 0.0)]);
    let tokenizer = Tokenizer::new(spelled.clone()).unwrap();
    let tokens = tokenizer.encode("xé\n", true, false).unwrap();
    assert_eq!(tokens, [1, 259, 3 + 0xC3, 3 + 0xA9, 3 + 0x0A]);
    assert_eq!(tokenizer.decode(&tokens), "<s> xé\n");
    assert_eq!(tokenizer.decode(&tokens[1..]), "xé\n");

    spelled.tokens[3 + 0xA9] = "no byte".to_owned();
    spelled.token_types[3 + 0xA9] = 1;
    let tokenizer = Tokenizer::new(spelled).unwrap();
    let error = tokenizer.encode("é", true, false).unwrap_err();
    assert!(
        matches!(error, Error::NoByteToken { byte: 0xA9 }),
        "{error}"
    );
}

#[test]
fn sentencepiece_has_default_bos_and_eos() {
    let tokenizer = Tokenizer::new(pieces_with_scores(&[])).unwrap();
    assert_eq!((tokenizer.bos(), tokenizer.eos()), (Some(1), Some(2)));
    assert!(tokenizer.is_eog(2));
    assert_eq!(tokenizer.encode("", true, true).unwrap(), [1]);
    let mut none = pieces_with_scores(&[]);
    none.add_bos = Some(false);
    let tokenizer = Tokenizer::new(none).unwrap();
    assert!(tokenizer.encode("", true, true).unwrap().is_empty());
}

#[test]
fn rejects_invalid_scores() {
    let mut short = pieces_with_scores(&[("a", 1.0)]);
    short.scores.pop();
    let short = error(short);
    assert!(
        matches!(
            short,
            Error::Scores {
                scores: 259,
                tokens: 260
            }
        ),
        "{short}"
    );
    let nan = error(pieces_with_scores(&[("a", f32::NAN)]));
    assert!(matches!(nan, Error::Score { id: 259 }), "{nan}");
    let mut without = pieces_with_scores(&[("ab", 1.0), ("▁", 1.0)]);
    without.scores.clear();
    assert_eq!(pieces(without, "ab", false), "<s>||ab");
}

/// llama.cpp does so if the name of the model contains `phi-3`.
#[test]
fn removes_whitespace_after_special_tokens_of_phi_3() {
    let mut phi = pieces_with_scores(&[("a", -1.0), ("▁", -2.0)]);
    for text in ["<|end|>", "<|endoftext|>"] {
        phi.tokens.push(text.to_owned());
        phi.token_types.push(3);
        phi.scores.push(0.0);
    }
    phi.add_space_prefix = Some(false);
    let encode = |vocabulary: &Vocabulary| {
        let tokenizer = Tokenizer::new(vocabulary.clone()).unwrap();
        let text = "a<|end|> \t a<|endoftext|> a";
        tokenizer.encode(text, false, true).unwrap()
    };
    // `\t` is a byte token.
    assert_eq!(encode(&phi), [259, 261, 260, 12, 260, 259, 262, 260, 259]);
    phi.strip_after_special = true;
    assert_eq!(encode(&phi), [259, 261, 259, 262, 260, 259]);
}
