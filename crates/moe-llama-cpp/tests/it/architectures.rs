//! Executor and llama.cpp agree for all architectures in F16: fixtures, and small models with headers of published ones.

use std::panic::{AssertUnwindSafe, catch_unwind};

use moe_gguf::{GgmlType, Gguf, Value};
use moe_llama_cpp::positions_to_allocate;

use crate::compare::Exact;
use crate::models::{changed, described, fixture, make, small};

#[test]
fn agree_on_fixtures() {
    let mut exact = Exact::default();
    for arch in ["dots1", "gpt-oss", "llama", "olmoe", "qwen2moe", "qwen3moe"] {
        let name = format!("random-{arch}-F16");
        exact.compare(&name, &fixture(format!("{name}.gguf")));
    }
    exact.check_all();
}

#[test]
fn agree_on_headers_of_published_models() {
    let dir = tempfile::tempdir().unwrap();
    let mut exact = Exact::default();
    for like in [
        "gpt-oss-20b",
        "mixtral-8x7b",
        "olmoe-1b-7b",
        "qwen3-30b-a3b",
    ] {
        let spec = small(like, "F16");
        // gpt-oss has YaRN scaling in its header.
        assert_eq!(spec.yarn.is_some(), like.starts_with("gpt-oss"));
        let path = make(dir.path(), like, &spec);
        exact.compare(like, &path);
    }
    exact.check_all();
}

#[test]
fn contexts_have_room_for_the_factors_of_longrope() {
    let dir = tempfile::tempdir().unwrap();
    let positions = |arch| {
        let gguf = Gguf::open(described(dir.path(), arch, GgmlType::F16)).unwrap();
        [512, 1024].map(|n_ctx| positions_to_allocate(&gguf, 20, n_ctx))
    };
    // `rope.scaling.original_context_length` is 512.
    assert_eq!(positions("phimoe"), [20, 513]);
    assert_eq!(positions("dbrx"), [20, 20]);
}

/// Architectures with a description in `fixtures/architectures`.
pub const DESCRIBED: [&str; 28] = [
    "afmoe",
    "arctic",
    "bailingmoe2",
    "cohere2moe",
    "dbrx",
    "deepseek2",
    "deepseek2-ocr",
    "ernie4_5-moe",
    "exaone-moe",
    "gemma4",
    "glm4moe",
    "granitehybrid",
    "granitemoe",
    "grok",
    "hunyuan-moe",
    "kimi-linear",
    "lfm2moe",
    "llama4",
    "mellum",
    "mimo2",
    "minimax-m2",
    "mistral4",
    "nemotron_h_moe",
    "phimoe",
    "qwen35moe",
    "qwen3next",
    "smallthinker",
    "step35",
];

/// Checks all architectures, and then reports those that failed.
pub fn check_each(
    archs: impl IntoIterator<Item = &'static str>,
    mut check: impl FnMut(&'static str),
) {
    let mut failed = Vec::new();
    for arch in archs {
        if catch_unwind(AssertUnwindSafe(|| check(arch))).is_err() {
            failed.push(arch);
        }
    }
    assert!(failed.is_empty(), "{failed:?}");
}

#[test]
fn agree_on_described_models() {
    let dir = tempfile::tempdir().unwrap();
    let mut exact = Exact::default();
    check_each(DESCRIBED, |arch| {
        for ty in [GgmlType::F32, GgmlType::F16, GgmlType::BF16] {
            let path = described(dir.path(), arch, ty);
            exact.compare_batches(&format!("{arch} {}", ty.name()), &path, ty);
        }
    });
    exact.check_all();
}

/// Keys of a header with their values.
type Keys = Vec<(String, Value)>;

/// Header keys that change the computation and that no fixture has.
#[test]
fn agree_on_optional_header_keys() {
    let dir = tempfile::tempdir().unwrap();
    let (text, n, x) = (
        |text: &str| Value::String(text.into()),
        Value::U32,
        Value::F32,
    );
    let yarn = |arch: &str, factor: f32, original: u32| {
        vec![
            (format!("{arch}.rope.scaling.type"), text("yarn")),
            (format!("{arch}.rope.scaling.factor"), x(factor)),
            (
                format!("{arch}.rope.scaling.original_context_length"),
                n(original),
            ),
        ]
    };
    let set = |keys: &[(&str, Value)]| {
        keys.iter()
            .map(|(key, value)| ((*key).to_owned(), value.clone()))
            .collect()
    };
    let own_base = ("gpt-oss.rope.freq_base_swa".to_owned(), x(1e4));
    let attn_factor = ("gpt-oss.rope.scaling.attn_factor".to_owned(), x(1.25));
    let groups = |arch: &str, n_used| {
        vec![
            (format!("{arch}.expert_group_count"), n(4)),
            (format!("{arch}.expert_group_used_count"), n(n_used)),
        ]
    };
    let changes: [(&str, &str, Keys); 9] = [
        ("gpt-oss", "yarn", yarn("gpt-oss", 32.0, 1024)),
        (
            "gpt-oss",
            "yarn and more",
            [yarn("gpt-oss", 32.0, 128), vec![own_base, attn_factor]].concat(),
        ),
        ("qwen3moe", "yarn", yarn("qwen3moe", 4.0, 128)),
        ("llama", "yarn", yarn("llama", 8.0, 64)),
        (
            "llama",
            "linear",
            set(&[("llama.rope.scaling.factor", x(4.0))]),
        ),
        ("dots1", "groups", groups("dots1", 2)),
        ("olmoe", "groups", groups("olmoe", 3)),
        (
            "dots1",
            "softmax",
            set(&[("dots1.expert_gating_func", n(1))]),
        ),
        (
            "dots1",
            "scale",
            set(&[
                ("dots1.expert_weights_scale", x(2.5)),
                ("dots1.expert_weights_norm", Value::Bool(false)),
            ]),
        ),
    ];
    let mut exact = Exact::default();
    for (arch, change, keys) in changes {
        let keys: Vec<(&str, Value)> = keys
            .iter()
            .map(|(key, v)| (key.as_str(), v.clone()))
            .collect();
        let path = changed(dir.path(), &format!("random-{arch}-F16"), &keys);
        exact.compare(&format!("{arch} {change}"), &path);
    }
    exact.check_all();
}
