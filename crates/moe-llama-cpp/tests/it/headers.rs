//! Headers for which llama.cpp would abort the process are refused before it reads them.

use moe_gguf::{Array, GgmlType, Gguf, Value, ValueType};
use moe_llama_cpp::{Error, Model};

use super::models::{changed, described_with};

/// Loads a fixture with changed header values of its architecture.
fn load(arch: &str, keys: &[(&str, Value)]) -> Result<Model, Error> {
    let dir = tempfile::tempdir().unwrap();
    let keys: Vec<(String, Value)> = keys
        .iter()
        .map(|(key, value)| (format!("{arch}.{key}"), value.clone()))
        .collect();
    let keys: Vec<(&str, Value)> = keys.iter().map(|(key, v)| (&**key, v.clone())).collect();
    let path = changed(dir.path(), &format!("random-{arch}-F16"), &keys);
    Model::load(&Gguf::open(path).unwrap())
}

fn array(values: &[u32]) -> Value {
    let values = values.iter().map(|&value| Value::U32(value));
    Value::Array(Box::new(Array::new(ValueType::U32, values).unwrap()))
}

#[test]
fn refuses_numbers_that_llama_cpp_asserts() {
    let groups = |n, used| {
        vec![
            ("expert_group_count", Value::U32(n)),
            ("expert_group_used_count", Value::U32(used)),
        ]
    };
    let one = |key, value| vec![(key, Value::U32(value))];
    let cases = [
        (one("block_count", 0), "block_count"),
        (one("block_count", 513), "block_count"),
        (one("nextn_predict_layers", 4), "nextn_predict_layers"),
        (one("nextn_predict_layers", 5), "nextn_predict_layers"),
        (one("expert_count", 1025), "expert_count"),
        (one("expert_count", 0), "expert_used_count"),
        (one("expert_used_count", 0), "expert_used_count"),
        (one("expert_used_count", 17), "expert_used_count"),
        (groups(16, 1), "expert_group_count"),
        (groups(3, 1), "expert_group_count"),
        (groups(4, 0), "expert_group_used_count"),
        (groups(4, 4), "expert_group_used_count"),
        (one("rope.dimension_count", 8), "rope.dimension_count"),
        (one("attention.value_length", 8), "attention.value_length"),
    ];
    for (keys, expected) in cases {
        let error = load("qwen3moe", &keys).err().unwrap();
        let expected = format!("qwen3moe.{expected}");
        assert!(
            matches!(&error, Error::Header { key, .. } if *key == expected),
            "{keys:?}: {error}"
        );
    }
}

/// For these, llama.cpp divides by zero or reads beyond the selected experts.
#[test]
fn refuses_other_numbers_of_experts_than_in_the_first_layer() {
    let list = |values: [u32; 4]| [("expert_used_count", array(&values))];
    for arch in ["gpt-oss", "qwen3moe"] {
        assert!(load(arch, &list([4, 4, 4, 4])).is_ok());
        for values in [[4, 5, 4, 4], [4, 3, 4, 4], [0, 4, 4, 4]] {
            let error = load(arch, &list(values)).err().unwrap();
            assert!(
                matches!(&error, Error::Header { key, .. } if key.ends_with("expert_used_count")),
                "{arch} {values:?}: {error}"
            );
        }
    }
}

#[test]
fn names_a_negative_number_of_experts() {
    let list = Array::new(ValueType::I32, [4, -2, 4, 4].map(Value::I32)).unwrap();
    for (key, value, shown) in [
        ("expert_count", Value::I32(-16), "-16"),
        ("expert_used_count", Value::I32(-3), "-3"),
        ("expert_used_count", Value::Array(Box::new(list)), "-2"),
        ("expert_group_count", Value::I64(-1), "-1"),
    ] {
        let message = load("qwen3moe", &[(key, value)]).err().unwrap().to_string();
        let expected = format!("`qwen3moe.{key}` is {shown}: it must be at least 0");
        assert!(message.contains(&expected), "{message}");
    }
}

#[test]
fn refuses_a_negative_epsilon() {
    for epsilon in [-1.0, f32::NAN] {
        let key = ("attention.layer_norm_rms_epsilon", Value::F32(epsilon));
        let error = load("olmoe", &[key]).err().unwrap();
        assert!(matches!(error, Error::Header { .. }), "{error}");
    }
}

#[test]
fn refuses_partial_rotation_of_heads() {
    for arch in ["dots1", "llama", "olmoe", "qwen2moe", "qwen3moe"] {
        for n_dims in [8, 17, 1 << 10] {
            let error = load(arch, &[("rope.dimension_count", Value::U32(n_dims))]).err();
            let message = error.unwrap().to_string();
            let expected = format!(
                "`{arch}.rope.dimension_count` is {n_dims}: for this architecture, llama.cpp needs"
            );
            assert!(message.contains(&expected), "{message}");
        }
    }
}

/// llama.cpp reads a cache that does not exist if an afmoe model has no window.
#[test]
fn refuses_afmoe_without_a_window() {
    const KEY: &str = "attention.sliding_window";
    let dir = tempfile::tempdir().unwrap();
    let load = |window: Option<u32>| {
        let path = described_with(dir.path(), "afmoe", GgmlType::F32, |keys| {
            let keys = keys.as_object_mut().unwrap();
            keys.remove(KEY);
            if let Some(window) = window {
                keys.insert(KEY.to_owned(), window.into());
            }
        });
        Model::load(&Gguf::open(path).unwrap())
    };
    for window in [None, Some(0)] {
        let message = load(window).err().unwrap().to_string();
        let expected = "`afmoe.attention.sliding_window` is 0: for this architecture";
        assert!(message.contains(expected), "{message}");
    }
    assert!(load(Some(32)).is_ok());
}

/// The same words as in the error of the executor.
#[test]
fn refuses_attention_that_is_not_causal() {
    for arch in ["gpt-oss", "qwen3moe"] {
        let causal = |value| [("attention.causal", Value::Bool(value))];
        let message = load(arch, &causal(false)).err().unwrap().to_string();
        let expected =
            format!("`{arch}.attention.causal` is false: the only supported value is true");
        assert!(message.contains(&expected), "{message}");
        assert!(load(arch, &causal(true)).is_ok());
    }
}

#[test]
fn refuses_an_unknown_rope_scaling() {
    let scaling = |name: &str| [("rope.scaling.type", Value::String(name.into()))];
    let error = load("gpt-oss", &scaling("dynamic")).err().unwrap();
    assert!(
        error.to_string().contains("none, linear, yarn, longrope"),
        "{error}"
    );
    assert!(load("gpt-oss", &scaling("linear")).is_ok());
}

/// llama.cpp itself returns an error for a key of the wrong type.
#[test]
fn leaves_other_errors_to_llama_cpp() {
    for key in ["block_count", "expert_count", "expert_used_count"] {
        let error = load("qwen3moe", &[(key, Value::F32(4.0))]).err();
        assert!(
            matches!(error, Some(Error::Load { .. })),
            "{key}: {error:?}"
        );
    }
}

/// llama.cpp throws an exception if a character needs a byte token that the vocabulary lacks.
#[test]
fn refuses_to_tokenize_a_character_without_byte_tokens() {
    const TOKENS: &str = "tokenizer.ggml.tokens";
    let gguf = Gguf::open(moe_testkit::fixture("random-llama-F16.gguf")).unwrap();
    let tokens = gguf.metadata().strings(TOKENS).unwrap().unwrap();
    let text = |token: &String| {
        let is_byte = token.starts_with("<0x");
        Value::String(if is_byte {
            String::new()
        } else {
            token.clone()
        })
    };
    let tokens = Array::new(ValueType::String, tokens.iter().map(text)).unwrap();
    let keys = [(TOKENS, Value::Array(Box::new(tokens)))];
    let dir = tempfile::tempdir().unwrap();
    let path = changed(dir.path(), "random-llama-F16", &keys);
    let model = Model::load(&Gguf::open(path).unwrap()).unwrap();
    let error = model.tokenize("\u{13000}", true, true).unwrap_err();
    assert!(
        matches!(error, Error::NoToken { character } if ['\u{13000}', ' '].contains(&character)),
        "{error}"
    );
    assert!(model.tokenize("", true, true).is_ok());
    let complete = Model::load(&gguf).unwrap();
    assert!(complete.tokenize("\u{1F600}", true, true).is_ok());
}
