//! Hyper-parameters: lists with one value per layer, unsupported values, keys without effect.

use std::cell::RefCell;
use std::rc::Rc;

use moe_engine::{Decode, Logits};
use moe_executor::cpu::threads::Threads;
use moe_executor::recorder::Recorder;
use moe_executor::{CacheParams, CacheType, Error, Model, Session, Warning};
use moe_gguf::{Array, GgmlType, Gguf, Value, ValueType};
use moe_synth::model::{Description, Synth};
use moe_synth::write;
use moe_trace::Phase;

use crate::records::described;

const MODELS: [&str; 6] = ["dots1", "gpt-oss", "llama", "olmoe", "qwen2moe", "qwen3moe"];

fn fixture(arch: &str) -> Gguf {
    Gguf::open(moe_testkit::fixture(format!("random-{arch}-F16.gguf"))).unwrap()
}

/// A fixture with some keys of its architecture replaced or added.
fn with_keys(arch: &str, keys: &[(&str, Value)]) -> Gguf {
    let keys = keys.iter();
    let keys: Vec<(String, &Value)> = keys
        .map(|(suffix, value)| (format!("{arch}.{suffix}"), value))
        .collect();
    replace_keys(&fixture(arch), &keys)
}

/// The model with some keys replaced or added.
fn replace_keys(gguf: &Gguf, keys: &[(String, &Value)]) -> Gguf {
    let is_set = |key: &str| keys.iter().any(|(name, _)| name == key);
    let mut header = write::Header::like(gguf, is_set).unwrap();
    for (key, value) in keys {
        header.set(key, value).unwrap();
    }
    for t in gguf.tensors() {
        let ne = &t.ne[..t.n_dims as usize];
        header.tensor(&t.name, t.ty, ne).unwrap();
    }
    let mut writer = write::Writer::new(Vec::new(), header).unwrap();
    for t in gguf.tensors() {
        writer.write(gguf.data(t).unwrap()).unwrap();
    }
    Gguf::from_bytes("changed.gguf", writer.finish().unwrap()).unwrap()
}

fn list(values: &[i32]) -> Value {
    let values = values.iter().map(|&value| Value::I32(value));
    Value::Array(Box::new(Array::new(ValueType::I32, values).unwrap()))
}

fn flags(values: &[bool]) -> Value {
    let values = values.iter().map(|&value| Value::Bool(value));
    Value::Array(Box::new(Array::new(ValueType::Bool, values).unwrap()))
}

/// Asserts that a value of a key is an error about this key. Returns the value and the reason of [`Error::BadKey`], or two
/// empty strings if the value has the wrong type.
fn rejected(arch: &str, suffix: &str, value: Value) -> (String, String) {
    let gguf = with_keys(arch, &[(suffix, value)]);
    let error = Model::load(&gguf).err();
    let error = error.unwrap_or_else(|| panic!("{arch}.{suffix} is not rejected"));
    assert!(!error.to_string().contains('\n'), "{error}");
    let name = format!("{arch}.{suffix}");
    match error {
        Error::BadKey {
            key, value, reason, ..
        } if key == name => (value, reason),
        Error::Gguf(moe_gguf::Error::WrongType { key, .. }) if key == name => Default::default(),
        error => panic!("{name}: {error}"),
    }
}

/// The logits after a prompt of `n` tokens, and by layer the number of selected experts of each token.
fn run(gguf: &Gguf, n: u32) -> (Vec<f32>, Vec<Vec<usize>>) {
    let model = Model::load(gguf).unwrap();
    let threads = Threads::new(1).unwrap();
    let mut session = Session::new(
        &model,
        &threads,
        Recorder::new(None),
        CacheParams::of_type(CacheType::F32, 512),
    )
    .unwrap();
    let n_layer = model.hparams().n_layer;
    let counts = Rc::new(RefCell::new(vec![Vec::new(); n_layer]));
    let seen = counts.clone();
    session.observe(Box::new(move |routed| {
        let k = routed.ids.len() / routed.positions.len();
        seen.borrow_mut()[routed.layer.index()].extend(routed.positions.iter().map(|_| k));
    }));
    let tokens: Vec<u32> = (300..300 + n).collect();
    let logits = session
        .decode(&tokens, Phase::Prompt, Logits::Last)
        .unwrap();
    let logits = logits.to_vec();
    drop(session);
    (logits, counts.take())
}

/// Keys that llama.cpp reads with `get_key_or_arr` for these architectures.
const PER_LAYER: [&str; 5] = [
    "attention.head_count",
    "attention.head_count_kv",
    "expert_feed_forward_length",
    "expert_used_count",
    "feed_forward_length",
];

#[test]
fn uniform_list_is_equivalent_to_its_value() {
    for arch in MODELS {
        let gguf = fixture(arch);
        let (logits, counts) = run(&gguf, 3);
        let number = |suffix: &str| {
            let number = gguf.metadata().u32(&format!("{arch}.{suffix}")).unwrap();
            number.map(|number| number as i32)
        };
        let n_block = number("block_count").unwrap() as usize;
        let keys = PER_LAYER
            .iter()
            .filter_map(|&key| Some((key, number(key)?)));
        let keys: Vec<(&str, Value)> = keys
            .map(|(key, value)| (key, list(&vec![value; n_block])))
            .collect();
        assert!(keys.len() >= 4, "{arch}");
        assert!(
            run(&with_keys(arch, &keys), 3) == (logits, counts),
            "{arch}"
        );
    }
}

#[test]
fn layers_select_their_own_number_of_experts() {
    let gguf = with_keys("qwen3moe", &[("expert_used_count", list(&[1, 4, 2, 16]))]);
    let model = Model::load(&gguf).unwrap();
    assert_eq!(model.hparams().n_expert_used, 16);
    assert_eq!(model.hparams().n_expert_used_by_layer, [1, 4, 2, 16]);
    let (logits, counts) = run(&gguf, 3);
    // The last layer computes only the last token.
    assert_eq!(counts, [vec![1; 3], vec![4; 3], vec![2; 3], vec![16]]);
    assert!(logits != run(&fixture("qwen3moe"), 3).0);
    // Entries of dense layers are ignored.
    let dense = with_keys("dots1", &[("expert_used_count", list(&[0, 4, 4]))]);
    assert!(run(&dense, 3) == run(&fixture("dots1"), 3));
}

#[test]
fn checks_widths_per_layer() {
    let dense = with_keys("dots1", &[("feed_forward_length", list(&[96, 0, 7]))]);
    assert!(run(&dense, 2) == run(&fixture("dots1"), 2));
    let gguf = with_keys(
        "gpt-oss",
        &[("expert_feed_forward_length", list(&[32, 32, 64, 32]))],
    );
    let error = Model::load(&gguf).err().unwrap();
    assert!(
        matches!(&error, Error::Shape { tensor, .. } if tensor == "blk.2.ffn_gate_exps.weight"),
        "{error}"
    );
}

#[test]
fn rejects_invalid_lists() {
    for arch in MODELS {
        let (_, reason) = rejected(arch, "expert_used_count", list(&[]));
        assert!(reason.contains("has 0"), "{reason}");
        let (value, _) = rejected(arch, "expert_used_count", list(&[2; 9]));
        assert_eq!(value, "[2, 2, 2, 2, 2, 2, 2, 2, 2]");
        rejected(arch, "expert_used_count", Value::String("2".into()));
        rejected(arch, "expert_used_count", Value::I32(-2));
        rejected(arch, "expert_used_count", Value::U32(0));
    }
    // Also if the widths of dense layers are not used.
    for arch in MODELS {
        let (_, reason) = rejected(arch, "feed_forward_length", list(&[48; 9]));
        assert!(reason.contains("has 9"), "{reason}");
    }
    rejected("llama", "expert_used_count", list(&[2, -1, 2]));
    for (values, wrong) in [([2, 0, 2], "0 in layer 1"), ([2, 9, 2], "9 in layer 1")] {
        let (value, reason) = rejected("llama", "expert_used_count", list(&values));
        assert_eq!(value, format!("{values:?}"));
        assert!(
            reason.contains(wrong) && reason.contains("1..=8"),
            "{reason}"
        );
    }
    for key in ["attention.head_count", "attention.head_count_kv"] {
        let (value, _) = rejected("llama", key, list(&[2, 2, 4]));
        assert_eq!(value, "[2, 2, 4]");
    }
    for key in [
        "block_count",
        "embedding_length",
        "expert_count",
        "context_length",
    ] {
        rejected("llama", key, list(&[1, 2, 3]));
    }
}

#[test]
fn rejects_attention_that_is_not_causal() {
    for arch in MODELS {
        let (value, _) = rejected(arch, "attention.causal", Value::Bool(false));
        assert_eq!(value, "false");
        let causal = with_keys(arch, &[("attention.causal", Value::Bool(true))]);
        assert!(run(&causal, 2) == run(&fixture(arch), 2), "{arch}");
        rejected(arch, "attention.causal", Value::U32(0));
    }
}

#[test]
fn rejects_a_dense_model() {
    let gguf = with_keys("llama", &[("expert_count", Value::U32(0))]);
    let error = Model::load(&gguf).err().unwrap();
    assert!(
        matches!(&error, Error::NoExperts { key, .. } if key == "llama.expert_count"),
        "{error}"
    );
}

#[test]
fn rejects_unsupported_values() {
    for arch in MODELS {
        let scaling = Value::String("longrope".into());
        let (_, reason) = rejected(arch, "rope.scaling.type", scaling);
        assert!(reason.contains("`linear` and `yarn`"), "{reason}");
        rejected(arch, "rope.scaling.factor", Value::F32(-2.0));
        rejected(arch, "rope.freq_base", Value::F32(f32::NAN));
        rejected(arch, "attention.value_length", Value::U32(8));
        // llama.cpp refuses to load these models, or fails when it builds the graph.
        for n_dims in [8, 17, 1 << 10] {
            rejected(arch, "rope.dimension_count", Value::U32(n_dims));
        }
    }
    for (key, value) in [
        ("attention.key_length_swa", 8),
        ("attention.value_length_swa", 8),
        ("rope.dimension_count_swa", 8),
        ("attention.sliding_window", 0),
    ] {
        rejected("gpt-oss", key, Value::U32(value));
    }
    rejected("dots1", "expert_gating_func", Value::U32(4));
    rejected("qwen3moe", "nextn_predict_layers", Value::U32(4));
}

/// A vocabulary with another number of tokens than embeddings, and a key of the wrong type; the message names the file once.
#[test]
fn rejects_vocabulary_of_another_size() {
    let gguf = fixture("olmoe");
    let with_tokens = |tokens: &Value| {
        let changed = replace_keys(&gguf, &[(TOKENS.to_owned(), tokens)]);
        Model::load(&changed).err().unwrap()
    };
    const TOKENS: &str = "tokenizer.ggml.tokens";
    let tokens = gguf.metadata().strings(TOKENS).unwrap().unwrap();
    let short = tokens[..2047].iter().cloned().map(Value::String);
    let short = Array::new(ValueType::String, short).unwrap();
    let error = with_tokens(&Value::Array(Box::new(short)));
    assert!(
        matches!(&error, Error::BadKey { key, value, reason, .. }
            if key == TOKENS && value.contains("2047") && reason.contains("2048")),
        "{error}"
    );
    let error = with_tokens(&Value::U32(1));
    assert!(
        matches!(&error, Error::Gguf(moe_gguf::Error::WrongType { key, .. }) if key == TOKENS),
        "{error}"
    );
    assert_eq!(error.to_string().matches("changed.gguf").count(), 1);
}

/// Blocks of an MTP head are not layers, but their tensors are not ignored silently.
#[test]
fn excludes_blocks_of_an_mtp_head_from_the_layers() {
    let gguf = with_keys("qwen3moe", &[("nextn_predict_layers", Value::U32(1))]);
    let error = Model::load(&gguf).err().unwrap();
    assert!(
        matches!(&error, Error::ExtraLayer { tensor, n_layer: 3, .. } if tensor.starts_with("blk.3.")),
        "{error}"
    );
    let without_tensors = with_keys(
        "qwen3moe",
        &[
            ("nextn_predict_layers", Value::U32(1)),
            ("block_count", Value::U32(5)),
            ("expert_used_count", list(&[4, 4, 4, 4, 1])),
        ],
    );
    assert!(run(&without_tensors, 3) == run(&fixture("qwen3moe"), 3));
}

#[test]
fn sliding_window_pattern_selects_the_windowed_layers() {
    const KEY: &str = "attention.sliding_window_pattern";
    // The prompt is longer than the window of 128 positions.
    let logits = |value: Option<Value>| {
        let keys: Vec<(&str, Value)> = value.into_iter().map(|value| (KEY, value)).collect();
        run(&with_keys("gpt-oss", &keys), 200).0
    };
    let every_other = logits(None);
    assert!(logits(Some(Value::U32(2))) == every_other);
    assert!(logits(Some(flags(&[true, false, true, false]))) == every_other);
    assert!(logits(Some(list(&[1, 0, 1, 0]))) == every_other);
    let none = logits(Some(Value::U32(1)));
    assert!(none != every_other);
    assert!(logits(Some(flags(&[false; 4]))) == none);
    assert!(logits(Some(Value::U32(3))) == logits(Some(flags(&[true, true, false, true]))));
    assert!(logits(Some(Value::U32(0))) == logits(Some(flags(&[true; 4]))));
    // Additional entries of a list are ignored, and layers beyond its end are not windowed.
    assert!(logits(Some(flags(&[true, false, true, false, true]))) == every_other);
    assert!(logits(Some(flags(&[true, false, true]))) == every_other);
    assert!(logits(Some(list(&[]))) == none);
}

/// Keys that llama.cpp reads only for other architectures have no effect.
#[test]
fn warns_about_keys_without_effect() {
    for (arch, key, value) in [
        ("qwen3moe", "attention.sliding_window", Value::U32(16)),
        ("qwen3moe", "expert_gating_func", Value::U32(2)),
        ("llama", "attention.scale", Value::F32(0.5)),
        ("llama", "logit_scale", Value::F32(8.0)),
        ("olmoe", "attention.clamp_kqv", Value::F32(8.0)),
        ("qwen2moe", "final_logit_softcapping", Value::F32(30.0)),
        ("gpt-oss", "rope.scaling.yarn_beta_fast", Value::F32(8.0)),
        ("llama", "a_key_of_tomorrow", Value::U32(2)),
    ] {
        let gguf = with_keys(arch, &[(key, value)]);
        let expected = Warning::IgnoredKey {
            key: format!("{arch}.{key}"),
            arch: arch.to_owned(),
        };
        assert_eq!(Model::load(&gguf).unwrap().warnings(), [expected]);
        assert!(run(&gguf, 3) == run(&fixture(arch), 3), "{arch}.{key}");
    }
    for arch in MODELS {
        assert_eq!(Model::load(&fixture(arch)).unwrap().warnings(), []);
        for (key, value) in [
            ("pooling_type", Value::U32(1)),
            ("logit_scale", Value::F32(1.0)),
            ("attention.clamp_kqv", Value::F32(0.0)),
            ("rope.scaling.finetuned", Value::Bool(true)),
        ] {
            let gguf = with_keys(arch, &[(key, value)]);
            assert_eq!(Model::load(&gguf).unwrap().warnings(), [], "{arch}.{key}");
        }
    }
}

/// The error for the model of a description with another value of a key.
fn rejected_description(arch: &str, key: &str, value: serde_json::Value) -> String {
    let path = moe_testkit::fixture(format!("architectures/{arch}.json"));
    let mut json: serde_json::Value =
        serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    json["keys"][key] = value;
    let description: Description = serde_json::from_value(json).unwrap();
    let synth = Synth::described(&description, GgmlType::F32, 5).unwrap();
    let gguf = Gguf::from_bytes(arch, synth.write(Vec::new()).unwrap()).unwrap();
    Model::load(&gguf).err().unwrap().to_string()
}

/// Like llama.cpp, which loads `output.weight` of these architectures without `TENSOR_NOT_REQUIRED`.
#[test]
fn requires_the_output_matrix_unless_embeddings_can_be_tied() {
    for (arch, is_required) in [
        ("bailingmoe2", true),
        ("dbrx", true),
        ("deepseek2", false),
        ("exaone-moe", true),
        ("glm4moe", false),
        ("kimi-linear", true),
        ("mellum", true),
        ("mimo2", true),
        ("minimax-m2", true),
        ("phimoe", true),
        ("step35", true),
    ] {
        let mut description = described::description(arch);
        description.tensors.remove("output.weight").unwrap();
        let gguf = described::model(&description, GgmlType::F16);
        match Model::load(&gguf).err() {
            Some(Error::MissingTensor { tensor, .. }) if is_required => {
                assert_eq!(tensor, "output.weight", "{arch}");
            }
            error => assert!(error.is_none() && !is_required, "{arch}: {error:?}"),
        }
    }
}

#[test]
fn rejects_invalid_keys_of_recurrent_layers() {
    use serde_json::json;
    for (arch, key, value, reason) in [
        (
            "lfm2moe",
            "shortconv.l_cache",
            json!(1),
            "at least 2 elements",
        ),
        (
            "lfm2moe",
            "attention.head_count_kv",
            json!([0, 0, 2, 0, 4, 0]),
            "the same number of heads",
        ),
        (
            "kimi-linear",
            "attention.head_count_kv",
            json!([0, 0, 0, 2, 0]),
            "it must be 1",
        ),
        ("kimi-linear", "kda.head_dim", json!(0), "out of range"),
        (
            "kimi-linear",
            "rope.dimension_count",
            json!(24),
            "less than",
        ),
        ("kimi-linear", "attention.kv_lora_rank", json!(16), "sum of"),
        ("qwen3next", "ssm.inner_size", json!(32), "the product of"),
        (
            "qwen3next",
            "ssm.group_count",
            json!(3),
            "a multiple of `ssm.group_count`",
        ),
        (
            "qwen35moe",
            "attention.recurrent_layers",
            json!([true]),
            "one value for each of the 6 blocks",
        ),
        (
            "qwen35moe",
            "rope.dimension_sections",
            json!([1, 1, 1, 1]),
            "the first three sections",
        ),
        (
            "qwen35moe",
            "rope.dimension_sections",
            json!([2, 1, 1]),
            "a list of 4 numbers",
        ),
    ] {
        let error = rejected_description(arch, key, value);
        assert!(error.contains(key) && error.contains(reason), "{error}");
    }
}
