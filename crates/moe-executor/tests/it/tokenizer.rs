//! The tokenizer against llama.cpp's tokens (`fixtures/reference`), and on faulty vocabularies.

use std::collections::HashMap;
use std::path::Path;

use moe_executor::tokenizer::{Error, Model, Role, Tokenizer, Vocabulary, Warning};
use moe_gguf::Gguf;
use moe_synth::write;
use moe_testkit::fixture;
use serde_json::Value;

fn json(name: &str) -> Value {
    let text = std::fs::read_to_string(fixture(Path::new("reference").join(name))).unwrap();
    serde_json::from_str(&text).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    let id = |v: &Value| u32::try_from(v.as_u64().unwrap()).unwrap();
    value.as_array().unwrap().iter().map(id).collect()
}

/// The tokenizers of the models that have been asked for.
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

fn holds(tokenizer: &Tokenizer, case: &Value) {
    let text = case["text"].as_str().unwrap();
    let flag = |name: &str| case[name].as_bool().unwrap();
    let tokens = tokenizer
        .encode(text, flag("add_special"), flag("parse_special"))
        .unwrap();
    assert_eq!(tokens, ids(&case["tokens"]), "{text:?} with {case}");
    assert_eq!(tokenizer.decode(&tokens), case["detokenized"], "{text:?}");
}

#[test]
fn encodes_and_decodes_as_llama_cpp() {
    let mut tokenizers = Tokenizers::default();
    let cases = json("tokenization.json");
    let cases = cases.as_array().unwrap();
    assert_eq!(cases.len(), 398);
    for case in cases {
        holds(tokenizers.of(case["model"].as_str().unwrap()), case);
    }
}

#[test]
fn encodes_and_decodes_with_scores_as_llama_cpp() {
    let prefixed = with_key("random-llama-F16.gguf", "", None).unwrap();
    let no = Some(moe_gguf::Value::Bool(false));
    let plain = with_key(
        "random-llama-F16.gguf",
        "tokenizer.ggml.add_space_prefix",
        no,
    )
    .unwrap();
    let cases = json("tokenization-llama.json");
    let (mut n_prefixed, mut n_plain) = (0, 0);
    for case in cases.as_array().unwrap() {
        match case.get("add_space_prefix") {
            Some(_) => {
                holds(&plain, case);
                n_plain += 1;
            }
            None => {
                holds(&prefixed, case);
                n_prefixed += 1;
            }
        }
    }
    assert_eq!((n_prefixed, n_plain), (323, 40));
}

#[test]
fn prompts_and_generated_texts_are_llama_cpps() {
    let mut tokenizers = Tokenizers::default();
    let mut runs = 0;
    for entry in std::fs::read_dir(fixture("reference")).unwrap() {
        let run = json(entry.unwrap().file_name().to_str().unwrap());
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

/// The tokenizer of a model whose key `key` is replaced, or left out.
fn with_key(model: &str, key: &str, value: Option<moe_gguf::Value>) -> Result<Tokenizer, Error> {
    let gguf = Gguf::open(fixture(model)).unwrap();
    let mut header = write::Header::like(&gguf, |k| k == key).unwrap();
    if let Some(value) = value {
        header.set(key, &value).unwrap();
    }
    let bytes = header.encode().unwrap().leak();
    Tokenizer::from_gguf(Gguf::from_static("changed", bytes).unwrap().metadata())
}

#[test]
fn unusable_metadata_is_an_error() {
    let with_key = |key: &str, value| with_key("tiny-qwen3moe-Q4_K_M.gguf", key, value);
    let string = |text: &str| Some(moe_gguf::Value::String(text.to_owned()));
    let error = |key: &str, value| with_key(key, value).err().expect("an error").to_string();
    assert_eq!(
        error("tokenizer.ggml.model", string("bert")),
        "tokenizer.ggml.model is `bert`, supported are `gpt2` (byte-level BPE) and `llama` (SentencePiece)"
    );
    for key in ["model", "tokens", "merges"] {
        let key = format!("tokenizer.ggml.{key}");
        let text = error(&key, None);
        assert!(
            text.starts_with(&format!("metadata key `{key}` is missing")),
            "{text}"
        );
    }
    let text = error("tokenizer.ggml.tokens", Some(moe_gguf::Value::U32(1)));
    assert!(text.contains("\"tokenizer.ggml.tokens\""), "{text}");
    assert!(with_key("tokenizer.ggml.token_type", None).is_ok());
    assert!(with_key("tokenizer.ggml.pre", string("gpt-4o")).is_ok());
    assert!(with_key("tokenizer.ggml.pre", None).is_ok());
}

/// A small vocabulary: `extra` tokens after one of each byte, and a few merges.
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

/// Pieces of `text`, with a bar between.
fn pieces(vocabulary: Vocabulary, text: &str, parse_special: bool) -> String {
    let tokenizer = Tokenizer::new(vocabulary).unwrap();
    let tokens = tokenizer.encode(text, true, parse_special).unwrap();
    let pieces: Vec<_> = tokens.iter().map(|&id| tokenizer.decode(&[id])).collect();
    pieces.join("|")
}

fn error(vocabulary: Vocabulary) -> String {
    let error = Tokenizer::new(vocabulary).err().expect("an error");
    let text = error.to_string();
    assert!(!text.contains('\n'), "{text}");
    text
}

#[test]
fn merges_run_by_rank_then_from_the_left() {
    let merged = vocabulary(&["ab", "bc", "aba"], &["b c", "a b", "ab a"]);
    assert_eq!(pieces(merged.clone(), "abc", false), "a|bc");
    assert_eq!(pieces(merged, "ababa", false), "ab|aba");
    let pairs = vocabulary(&["aa"], &["a a"]);
    assert_eq!(pieces(pairs, "aaa", false), "aa|a");
    // A pair that comes again keeps its first rank.
    let again = vocabulary(&["ab", "bc"], &["b c", "a b", "b c"]);
    assert_eq!(pieces(again, "abc", false), "a|bc");
}

#[test]
fn words_that_are_tokens_stay_whole_where_the_rule_says_so() {
    let mut whole = vocabulary(&["ab", "abc", "<s>"], &["a b"]);
    assert_eq!(pieces(whole.clone(), "abc", false), "ab|c");
    whole.pre = Some("llama-bpe".to_owned());
    whole.roles.insert(Role::Bos, 258);
    assert_eq!(pieces(whole.clone(), "abc", false), "<s>|abc");
    whole.add_bos = Some(false);
    assert_eq!(pieces(whole, "abc", false), "abc");
}

#[test]
fn a_byte_without_a_token_is_left_out_and_keeps_its_neighbours_apart() {
    let mut gap = vocabulary(&["ab"], &["a b"]);
    let x = gap.tokens.iter().position(|text| text == "x").unwrap();
    gap.tokens[x] = "xx".to_owned();
    assert_eq!(pieces(gap.clone(), "axb", false), "a|b");
    assert_eq!(pieces(gap, "ab", false), "ab");
}

#[test]
fn special_tokens_are_found_longest_first() {
    let mut special = vocabulary(&["<a>", "<a><b>", "<c>", "<u>"], &[]);
    special.token_types = vec![1; 256];
    special.token_types.extend([3, 3, 2, 4]);
    assert_eq!(
        pieces(special.clone(), "<a><a><b>x<c><u>", true),
        "<a>|<a><b>|x|<c>|<u>"
    );
    // Without parsing only user-defined tokens are.
    assert_eq!(pieces(special, "<a>x<c><u>", false), "<|a|>|x|<|c|>|<u>");
}

#[test]
fn bos_and_eos_are_added_on_demand() {
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
fn well_known_texts_are_special_whatever_their_type() {
    let texts = ["<|im_end|>", "<|fim_prefix|>", "<|repo_name|>", "<|start|>"];
    let mut known = vocabulary(&texts, &[]);
    known.token_types = vec![1; 256];
    known.token_types.extend([4, 4, 1, 3]);
    let tokenizer = Tokenizer::new(known).unwrap();
    let ends: Vec<u32> = (0..260).filter(|&id| tokenizer.is_eog(id)).collect();
    // 11 is EOS, as in llama.cpp where the file names none.
    assert_eq!(ends, [11, 256, 258]);
    for (id, text) in (256..).zip(texts) {
        assert_eq!(tokenizer.encode(text, false, true).unwrap(), [id]);
        let found = tokenizer.encode(text, false, false).unwrap() == [id];
        assert_eq!(found, text == "<|start|>", "{text}");
    }
}

#[test]
fn harmonys_end_of_message_does_not_end_generation() {
    let plain = Tokenizer::new(vocabulary(&["<|end|>"], &[])).unwrap();
    assert!(plain.is_eog(256));
    let harmony = vocabulary(&["<|end|>", "<|return|>", "<|call|>"], &[]);
    let harmony = Tokenizer::new(harmony).unwrap();
    assert!(!harmony.is_eog(256) && harmony.is_eog(257) && harmony.is_eog(258));
    assert_eq!(harmony.encode("<|end|>", false, false).unwrap(), [256]);
}

#[test]
fn pieces_of_odd_tokens() {
    let mut odd = vocabulary(&["<0x0A>", "", "unused", "Ġ▁"], &[]);
    odd.token_types = vec![1; 256];
    odd.token_types.extend([6, 1, 5, 1]);
    let tokenizer = Tokenizer::new(odd).unwrap();
    assert_eq!(tokenizer.piece(256), b"\n");
    assert_eq!(tokenizer.piece(257), b"[EMPTY_257]");
    assert_eq!(tokenizer.piece(258), b"");
    assert_eq!(tokenizer.piece(259), " ▁".as_bytes());
    // Half of a character, and both halves.
    let halves = tokenizer.encode("é", false, false).unwrap();
    assert_eq!(halves.len(), 2);
    assert_eq!(tokenizer.decode(&halves[..1]), "\u{FFFD}");
    assert_eq!(tokenizer.decode(&halves), "é");
}

/// llama.cpp ranks merges without looking their results up: `ac` is no token, but a step to one.
#[test]
fn merges_need_no_tokens() {
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
    // What stays without a token is spelled.
    assert_eq!(pieces(step, "abd", false), "a|b|d");
    // As single bytes of the alphabet's text, of which those of `Ġ` are none.
    let spaced = vocabulary(&[], &["Ġ a"]);
    assert_eq!(pieces(spaced, " ab", false), "a|b");
}

#[test]
fn malformed_merges_are_ignored_with_a_warning() {
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
        let text = tokenizer.warnings()[0].to_string();
        assert!(
            text.starts_with("tokenizer.ggml.merges: 2 entries are not two tokens that make a third, the first is entry 1, `"),
            "{text}"
        );
    }
    let fine = Tokenizer::new(vocabulary(&["ab"], &["a b"])).unwrap();
    assert_eq!(fine.warnings(), []);
}

/// llama.cpp: "bad special token, using default id".
#[test]
fn special_ids_outside_the_vocabulary_fall_back_with_a_warning() {
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
    // Other converters write -1 for "none".
    let none = Some(moe_gguf::Value::I32(-1));
    let tokenizer = with_key(
        "tiny-qwen3moe-Q4_K_M.gguf",
        "tokenizer.ggml.eos_token_id",
        none,
    );
    assert_eq!(tokenizer.unwrap().warnings().len(), 1);
    let text = Some(moe_gguf::Value::String("</s>".into()));
    let wrong = with_key(
        "tiny-qwen3moe-Q4_K_M.gguf",
        "tokenizer.ggml.eos_token_id",
        text,
    );
    assert!(wrong.err().unwrap().to_string().contains("eos_token_id"));

    let mut range = vocabulary(&[], &[]);
    range.roles.insert(Role::Eos, 256);
    let tokenizer = Tokenizer::new(range).unwrap();
    assert_eq!(
        tokenizer.warnings()[0].to_string(),
        "metadata key `tokenizer.ggml.eos_token_id` is 256, but the vocabulary has 256 tokens; the default id 11 is used"
    );
    assert_eq!(tokenizer.eos(), Some(11));
}

#[test]
fn default_ids_are_those_of_llama_cpp() {
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

/// llama.cpp takes the first entries of longer lists, and integers for scores.
#[test]
fn lists_longer_than_the_vocabulary_are_accepted() {
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
fn faulty_vocabularies_are_errors() {
    assert_eq!(
        error(vocabulary(&["ab", "x", "ab"], &[])),
        "tokenizer.ggml.tokens: ids 87 and 257 are both `x`"
    );

    let mut types = vocabulary(&[], &[]);
    types.token_types = vec![1; 255];
    assert_eq!(
        error(types),
        "tokenizer.ggml.token_type has 255 entries for 256 tokens; convert the model again"
    );

    let mut byte = vocabulary(&["<0xZZ>"], &[]);
    byte.token_types = vec![1; 256];
    byte.token_types.push(6);
    assert!(error(byte).contains("id 256 is a byte token"));

    let mut bos = vocabulary(&[], &[]);
    bos.pre = Some("glm4".into());
    bos.add_bos = Some(true);
    assert!(error(bos).contains("`tokenizer.ggml.bos_token_id` is missing"));

    let mut pre = vocabulary(&[], &[]);
    pre.pre = Some("made-up".to_owned());
    assert!(error(pre).contains("tokenizer.ggml.pre is `made-up`, supported are qwen2"));

    let empty = Tokenizer::new(Vocabulary::default()).unwrap();
    assert!(empty.encode("text", true, true).unwrap().is_empty());
    assert_eq!(empty.n_vocab(), 0);
}

/// Pieces with scores behind the special tokens and one token of each byte.
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

#[test]
fn pairs_merge_by_score_then_from_the_left() {
    let scored = pieces_with_scores(&[("ab", -2.0), ("bc", -1.0), ("▁a", -3.0)]);
    assert_eq!(pieces(scored, "abc", false), "<s>|a|bc");
    // zero and minus zero are the same score
    let equal = pieces_with_scores(&[("ab", -0.0), ("bc", 0.0), ("▁", -9.0)]);
    assert_eq!(pieces(equal, "abc", false), "<s>||ab|c");
    // a pair that was queued before one of the two grew is no pair any more
    let grown = pieces_with_scores(&[("aa", -1.0), ("aaa", -2.0), ("aaaa", -3.0)]);
    assert_eq!(
        pieces(grown, "aaaaa", false),
        "<s>|\u{FFFD}|\u{FFFD}|\u{FFFD}|aa|aaa"
    );
}

#[test]
fn what_no_piece_covers_is_spelled_in_bytes() {
    let mut spelled = pieces_with_scores(&[("▁x", 0.0), ("▁", 0.0), ("x", 0.0)]);
    let tokenizer = Tokenizer::new(spelled.clone()).unwrap();
    let tokens = tokenizer.encode("xé\n", true, false).unwrap();
    assert_eq!(tokens, [1, 259, 3 + 0xC3, 3 + 0xA9, 3 + 0x0A]);
    assert_eq!(tokenizer.decode(&tokens), "<s> xé\n");
    assert_eq!(tokenizer.decode(&tokens[1..]), "xé\n");

    spelled.tokens[3 + 0xA9] = "no byte".to_owned();
    spelled.token_types[3 + 0xA9] = 1;
    let tokenizer = Tokenizer::new(spelled).unwrap();
    let error = tokenizer.encode("é", true, false).unwrap_err().to_string();
    assert!(error.contains("byte 0xA9"), "{error}");
}

#[test]
fn ends_of_texts_have_ids_where_the_file_is_silent() {
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
fn faulty_scores_are_errors() {
    let mut short = pieces_with_scores(&[("a", 1.0)]);
    short.scores.pop();
    assert_eq!(
        error(short),
        "tokenizer.ggml.scores has 259 entries for 260 tokens; convert the model again"
    );
    let nan = pieces_with_scores(&[("a", f32::NAN)]);
    assert_eq!(
        error(nan),
        "tokenizer.ggml.scores: entry 259 is not a number"
    );
    let mut silent = pieces_with_scores(&[("ab", 1.0), ("▁", 1.0)]);
    silent.scores.clear();
    assert_eq!(pieces(silent, "ab", false), "<s>||ab");
}
