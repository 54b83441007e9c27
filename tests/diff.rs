//! `diff`: recorded runs compared with themselves, other settings, other quantizations, and other inputs.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::support::{Arg, arg, args, fail, moe_analyze, repository, run};

const PROMPT: &str = "The kernel driver is responsible for";

/// Records a run of a fixture, or of a file, into `dir/name`.
fn record(dir: &Path, name: &str, model: &Path, args: &[&str]) -> PathBuf {
    let out = dir.join(name);
    let own = ["record", "--model", arg(model), "--out", arg(&out), "--ignore-eos"];
    let n_predict = if args.contains(&"-n") {
        &[][..]
    } else {
        &["-n", "6"]
    };
    run![own, n_predict, args];
    out
}

fn tiny() -> PathBuf {
    repository("fixtures/tiny-qwen3moe-Q4_K_M.gguf")
}

/// The exit code and stdout of `diff`.
fn diff(a: &Path, b: &Path, args: impl Arg) -> (i32, String) {
    let own = ["--quiet", "diff", arg(a), arg(b)];
    let output = moe_analyze().args(args![own, args]).output().unwrap();
    assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
    (output.status.code().unwrap(), String::from_utf8(output.stdout).unwrap())
}

/// The rows of `-o json`, which must end with exit 1.
fn differences(a: &Path, b: &Path, args: impl Arg) -> Vec<Value> {
    let (code, json) = diff(a, b, args![args, "-o", "json"]);
    assert_eq!(code, 1, "{json}");
    serde_json::from_str(&json).unwrap()
}

fn of<'r>(rows: &'r [Value], part: &str, what: &str) -> Vec<&'r Value> {
    rows.iter()
        .filter(|row| row["part"] == part && row["what"] == what)
        .collect()
}

#[test]
fn identical_runs_are_equal() {
    let dir = tempfile::tempdir().unwrap();
    let a = record(dir.path(), "a", &tiny(), &["-p", PROMPT]);
    let b = record(dir.path(), "b", &tiny(), &["-p", PROMPT]);
    let (code, text) = diff(&a, &b, args![]);
    assert_eq!(code, 0, "{text}");
    // 9 prompt and 6 generated tokens in layers 0 to 4; in the last layer one token of the prompt.
    let verdict = text.lines().next().unwrap();
    assert!(verdict.starts_with("equal: routing (82 routed tokens), operations ("), "{verdict}");
    assert!(!text.contains("manifest"), "{text}");

    let (code, text) = diff(&a, &b.join("trace.bin"), ["--only", "bytes,routing"]);
    assert_eq!(code, 0, "{text}");
    assert!(text.contains("entire expert tensors") && !text.contains("operations"), "{text}");
}

#[test]
fn different_sampling_differs_in_routing() {
    let dir = tempfile::tempdir().unwrap();
    let a = record(dir.path(), "a", &tiny(), &["-p", PROMPT, "--temp", "4", "--seed", "1"]);
    let b = record(dir.path(), "b", &tiny(), &["-p", PROMPT, "--temp", "4", "--seed", "2"]);
    let rows = differences(&a, &b, ["--limit", "3"]);
    let sampling = of(&rows, "manifest", "sampling");
    assert!(sampling[0]["a"].as_str().unwrap().contains("seed 1"), "{sampling:?}");
    assert!(sampling[0]["b"].as_str().unwrap().contains("seed 2"));
    assert_eq!(rows.iter().filter(|row| row["part"] == "manifest").count(), 1);
    // The prompt is the same, so only tokens after it differ.
    let listed: Vec<&Value> = rows
        .iter()
        .filter(|row| row["part"] == "routing_row")
        .collect();
    assert_eq!(listed.len(), 3);
    for row in listed {
        assert_eq!(row["phase"], "generate");
        assert!(row["token_id"].as_u64().unwrap() >= 9, "{row}");
        assert_eq!(row["a"].as_str().unwrap().split(' ').count(), 4);
        assert_ne!(row["a"], row["b"]);
    }
    let total = of(&rows, "routing_total", "other_experts")[0]["value"]
        .as_u64()
        .unwrap();
    let layers = of(&rows, "routing", "other_experts");
    assert_eq!(layers.len(), 6);
    let sum: u64 = layers
        .iter()
        .map(|row| row["value"].as_u64().unwrap())
        .sum();
    assert_eq!(sum, total);
    assert_eq!(of(&rows, "routing_total", "rows")[0]["a"], 82);
    // Operations do not depend on the evaluated tokens.
    assert_eq!(diff(&a, &b, ["--only", "operations"]).0, 0);
}

#[test]
fn longer_prompt_has_additional_tokens() {
    let dir = tempfile::tempdir().unwrap();
    let tokens = |ids: &str| {
        let file = dir.path().join("prompts.jsonl");
        fs::write(&file, format!("{{\"tokens\":[{ids}]}}\n")).unwrap();
        file
    };
    let a = record(dir.path(), "a", &tiny(), &["--prompts", arg(&tokens("5,6,7")), "-n", "0"]);
    let b = record(dir.path(), "b", &tiny(), &["--prompts", arg(&tokens("5,6,7,8")), "-n", "0"]);
    let rows = differences(&a, &b, ["--weight-tolerance", "0.001"]);
    // Without a token to generate, no position's output is needed: layers 0 to 4 route the prompt.
    let only = of(&rows, "routing_total", "only")[0];
    assert_eq!((&only["a"], &only["b"]), (&json!(0), &json!(5)));
    assert_eq!(of(&rows, "routing_total", "other_experts")[0]["value"], 0);
    let listed = of(&rows, "routing_row", "only_in_B");
    assert!(
        listed
            .iter()
            .all(|row| row["token_id"] == 3 && row["a"] == ""),
        "{listed:?}"
    );
}

#[test]
fn quantizations_differ_only_in_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let spec = dir.path().join("spec.json");
    let description = json!({
        "arch": "qwen3moe", "n_layer": 2, "n_embd": 256, "n_head": 4, "n_expert": 8, "n_expert_used": 2,
        "n_ff_exp": 256, "vocab": { "n_tokens": 1000, "pre": "qwen2" },
    });
    fs::write(&spec, description.to_string()).unwrap();
    let run = |quant: &str| {
        let model = dir.path().join(format!("{quant}.gguf"));
        run!["synth", "--spec", spec, "--quant", quant, "--out", model];
        record(dir.path(), quant, &model, &["-p", "a b"])
    };
    let (f16, q4) = (run("F16"), run("Q4_K"));
    let (code, text) = diff(&f16, &q4, ["--only", "operations"]);
    assert_eq!(code, 0, "{text}");
    let rows = differences(&f16, &q4, ["--only", "bytes", "--limit", "1000"]);
    let types = of(&rows, "manifest", "expert_types")[0];
    assert_eq!((&types["a"], &types["b"]), (&json!("F16"), &json!("Q4_K")));
    let gate = of(&rows, "range", "other_size");
    let gate = gate
        .iter()
        .find(|row| row["name"] == "blk.1.ffn_gate_exps.weight")
        .unwrap();
    // 256 × 256 elements: 2 bytes each, or 144 bytes for each 256 of them.
    let has = |side: &str, bytes: &str| gate[side].as_str().unwrap().contains(bytes);
    assert!(has("a", "bytes 131072 ") && has("b", "bytes 36864 "), "{gate}");
    assert!(gate["expert_id"].is_u64());
}

#[test]
fn compares_models_of_different_shapes() {
    let dir = tempfile::tempdir().unwrap();
    let random = repository("fixtures/random-qwen3moe-F16.gguf");
    let a = record(dir.path(), "a", &tiny(), &["-p", PROMPT]);
    let b = record(dir.path(), "b", &random, &["-p", PROMPT]);
    let (code, text) = diff(&a, &b, args![]);
    assert_eq!(code, 1);
    assert!(text.starts_with("different: routing ("), "{text}");
    assert!(text.contains("\nexperts in a layer  32 "), "{text}");
    let (_, markdown) = diff(&a, &b, ["-o", "md", "--only", "routing"]);
    assert!(markdown.starts_with("| part | what |"), "{markdown}");
}

#[test]
fn rejects_inputs_that_are_not_runs() {
    let dir = tempfile::tempdir().unwrap();
    let run = record(dir.path(), "run", &tiny(), &["-p", PROMPT]);
    let refused = |path: &Path, expected: &str| {
        for paths in [[path, &run], [&run, path]] {
            let line = fail!["--quiet", "diff", paths[0], paths[1]];
            assert!(line.contains(expected), "{expected}: {line}");
        }
    };
    refused(&dir.path().join("absent"), "cannot open");
    refused(&tiny(), "is not a run");
    let dump = repository("fixtures/foreign/sglang-pt/stat.pt");
    refused(&dump, "has the format sglang-pt");
    refused(dir.path(), "neither a run directory");
    let trace = fs::read(run.join("trace.bin")).unwrap();
    let broken = dir.path().join("broken.bin");
    let mut bytes = trace.clone();
    bytes[5 * 1024 + 857] = 9;
    fs::write(&broken, &bytes).unwrap();
    refused(&broken, "ext_version 9");
    for tolerance in ["-1", "NaN", "much"] {
        let line = fail!["diff", run, run, "--weight-tolerance", tolerance];
        assert!(line.contains("expected a number of at least 0"), "{line}");
    }
    assert!(fail!["diff", run, run, "--only", "text"].contains("routing"));

    // A truncated trace is compared up to its end.
    let truncated = dir.path().join("truncated.bin");
    fs::write(&truncated, &trace[..trace.len() - 100]).unwrap();
    let (code, text) = diff(&truncated, &run, ["--only", "operations"]);
    assert_eq!(code, 1);
    assert!(text.starts_with("different: operations (1 only in B)"), "{text}");
}
