//! `convert`.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use moe_trace::record::{PHASE_GENERATE, PHASE_PROMPT};
use serde_json::Value;

use super::{COUNTS, golden, hotness};
use crate::support::{N_LAYER, arg, experts_of, fail, known_run, repository, run, tokens_of};

/// Size of an expert of the tiny qwen3moe model: gate and up of 64 × 256 in Q4_K (9216 bytes each), down in Q5_0 (11264) or Q8_0 (17408).
const EXPERT_BYTES: [&str; 6] = [
    "# layer=0 expert_bytes=29696", "# layer=1 expert_bytes=29696", "# layer=2 expert_bytes=35840",
    "# layer=3 expert_bytes=29696", "# layer=4 expert_bytes=29696", "# layer=5 expert_bytes=35840",
];

/// The routing that TensorAccessLog's tracer records: of the prompt the first token of each layer, then every generated token.
#[test]
fn converts_a_run_to_thesis_json_and_back() {
    let dir = tempfile::tempdir().unwrap();
    let (run, json) = (dir.path().join("run"), dir.path().join("json"));
    known_run(&run);
    run!["--quiet", "convert", run, "--to", "thesis-json", "--out", json];
    let mut expected = BTreeMap::new();
    for layer in 0..N_LAYER {
        let prompt = tokens_of(layer, PHASE_PROMPT).take(1);
        for token in prompt.chain(tokens_of(layer, PHASE_GENERATE)) {
            for expert in experts_of(token, layer) {
                *expected.entry((layer.into(), expert.into())).or_default() += 1;
            }
        }
    }
    assert_eq!(hotness(&json, &[]), expected);
}

#[test]
fn rejects_counts_for_formats_with_order() {
    let dir = tempfile::tempdir().unwrap();
    let learn = golden("learn/new.json");
    let tables = dir.path().join("tables");
    let error = fail!["--quiet", "parquet", learn, "--out", tables];
    assert!(error.contains("counts alone") && error.contains("hotness"), "{error}");
    assert!(!tables.exists());
    let out = dir.path().join("out.jsonl");
    let error = fail!["--quiet", "convert", learn, "--to", "jsonl", "--out", out];
    assert!(error.contains("counts alone"), "{error}");
    assert!(!out.exists());
}

#[test]
fn converted_learn_file_has_equal_counts() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("learn.json");
    let learn = golden("learn/new.json");
    for from in
        [&golden("bigmoeonedge/small.route.csv"), &golden("coli-usage/old.coli_usage"), &learn]
    {
        run!["--quiet", "convert", from, "--to", "learn", "--out", out, "--force"];
        assert_eq!(hotness(&out, &[]), BTreeMap::from(COUNTS));
    }
    // A learn file keeps its passes.
    let (before, after): (Value, Value) = (
        serde_json::from_slice(&fs::read(&learn).unwrap()).unwrap(),
        serde_json::from_slice(&fs::read(&out).unwrap()).unwrap(),
    );
    assert_eq!(before, after);
}

#[test]
fn convert_reports_what_it_cannot_write() {
    let dir = tempfile::tempdir().unwrap();
    let route = golden("bigmoeonedge/small.route.csv");
    let out = dir.path().join("out");
    let convert = |from: &Path, to: &str, out: &Path| {
        fail!["--quiet", "convert", from, "--to", to, "--out", out]
    };
    assert!(convert(&route, "xml", &out).contains("learn, "));
    fs::write(&out, "mine").unwrap();
    assert!(convert(&route, "learn", &out).contains("--force"));
    assert!(convert(&route, "mesh-llm", &out).contains("is a file"));
    let readme = repository("README.md");
    assert!(convert(&readme, "learn", &dir.path().join("new")).contains("convert --list"));
    assert_eq!(fs::read_to_string(&out).unwrap(), "mine");

    let json = dir.path().join("json");
    let error = convert(&route, "thesis-json", &json);
    assert!(error.starts_with("moe-analyze: thesis-json needs the operations of a run"), "{error}");
    assert!(!json.exists());

    let list: Vec<Value> = serde_json::from_str(&run!["convert", "--list", "-o", "json"]).unwrap();
    let of = |name: &str| {
        list.iter()
            .find(|row| row["format"] == name)
            .map(|row| row["direction"].clone())
    };
    assert_eq!(of("learn"), Some("both".into()));
    assert_eq!(of("megatron"), Some("read".into()));
    let named = list.iter().filter(|row| row["direction"] != "write");
    let documented = fs::read_to_string(repository("docs/foreign-formats.md")).unwrap();
    for row in named {
        let name = row["format"].as_str().unwrap();
        assert!(
            documented.contains(&format!("| `{name}` |")),
            "{name} is in docs/foreign-formats.md"
        );
    }
}

/// A run's map contains the expert sizes, like its model.
#[test]
fn converts_expert_sizes_of_the_map() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    known_run(&run);
    let model = repository("fixtures/tiny-qwen3moe-Q4_K_M.gguf");
    let preamble = |name: &str, more: &[&str]| -> Vec<String> {
        let out = dir.path().join(name);
        let args = ["--quiet", "convert", arg(&run), "--to", "bigmoeonedge", "--out", arg(&out)];
        run![args, more];
        let text = fs::read_to_string(&out).unwrap();
        let lines = text.lines().filter(|line| line.starts_with("# layer="));
        lines.map(str::to_owned).collect()
    };
    let lines = preamble("route.csv", &[]);
    assert_eq!(lines, EXPERT_BYTES);
    assert_eq!(lines, preamble("of-model.csv", &["--model", arg(&model)]));
    // A run without a map does not contain them.
    fs::remove_file(run.join("gguf-map.parquet")).unwrap();
    assert!(preamble("without.csv", &[]).is_empty());
}
