//! `record`, and all steps from a model to a learn file.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use moe_trace::buffers::{self, Change};
use moe_trace::{LayerId, Manifest, Run, TensorAccessLog};
use serde_json::Value;

use crate::support::{arg, args, fail, file_of, moe_analyze, repository, run, write_gguf};

const PROMPT: &str = "The kernel driver is responsible for";

fn tiny_qwen3moe() -> PathBuf {
    repository("fixtures/tiny-qwen3moe-Q4_K_M.gguf")
}

/// Records a few tokens. Returns the generated text.
fn record(model: &Path, out: &Path) -> String {
    run!["record", "--model", model, "--prompt", PROMPT, "--n-predict", "12", "--out", out]
}

/// Routed tokens of each layer, from the counts of `routing`: layer → (tokens, Σ counts).
fn sums(hotness: &[Value]) -> BTreeMap<u64, u64> {
    let mut sums = BTreeMap::new();
    for row in hotness {
        *sums.entry(row["layer_id"].as_u64().unwrap()).or_default() +=
            row["count"].as_u64().unwrap();
    }
    sums
}

/// Records with a changed key of the qwen3moe fixture. Returns whether it succeeded, and stderr.
fn record_with(key: &str, value: moe_gguf::Value) -> (Option<i32>, String) {
    let dir = tempfile::tempdir().unwrap();
    record_in(dir.path(), &[(key, value)])
}

/// Like [`record_with`], with several keys, into `run` of a directory.
fn record_in(dir: &Path, keys: &[(&str, moe_gguf::Value)]) -> (Option<i32>, String) {
    let (model, out) = (dir.join("m.gguf"), dir.join("run"));
    let like = moe_gguf::Gguf::open(tiny_qwen3moe()).unwrap();
    write_gguf(&model, Some(&like), keys, &[]);
    let args = ["record", "--model", arg(&model), "--prompt", PROMPT, "-n", "1"];
    let output = moe_analyze().args(args).args(args!["--out", out]).output();
    let output = output.unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    (output.status.code(), stderr)
}

/// The size that is printed before a session starts is that of the cache it allocates, for every type.
#[test]
fn prints_size_of_the_cache_before_it_is_allocated() {
    for (k, v) in [("f32", "f32"), ("f16", "f16"), ("q8_0", "q8_0"), ("q8_0", "f32")] {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("run");
        let types = ["--cache-type-k", k, "--cache-type-v", v];
        let how = ["--prompt", PROMPT, "--n-predict", "12", "--ignore-eos"];
        let args = args!["record", "--model", tiny_qwen3moe(), how, types, "--out", out];
        let output = moe_analyze().args(args).output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        let mut lines = stderr.lines();
        let printed = lines.next().unwrap();
        assert!(lines.next().unwrap().starts_with("recording to "), "{stderr}");

        let cache = Manifest::of_run(&out).unwrap().unwrap().kv_cache.unwrap();
        let mut sizes = BTreeMap::new();
        for event in buffers::read(&out.join(buffers::FILE_NAME)).unwrap() {
            if let Change::Alloc(buffer) = event.change
                && buffer.name.starts_with("cache_")
            {
                sizes.insert(buffer.buffer_id, buffer.size);
            }
        }
        let allocated = sizes.values().sum::<u64>();
        assert_eq!(cache.size_bytes, Some(allocated), "{k} and {v}");
        let kib = allocated as f64 / 1024.0;
        let n_positions = cache.n_positions.unwrap();
        let expected =
            format!("KV cache: {kib:.1} KiB, keys {k}, values {v}, {n_positions} positions");
        assert_eq!(printed, expected);
    }
}

#[test]
fn rejects_keys_that_change_the_computation() {
    let list = |values: &[u32]| {
        let values = values.iter().map(|&value| moe_gguf::Value::U32(value));
        let array = moe_gguf::Array::new(moe_gguf::ValueType::U32, values);
        moe_gguf::Value::Array(Box::new(array.unwrap()))
    };
    for (key, value, expected) in [
        ("qwen3moe.attention.causal", moe_gguf::Value::Bool(false), "is false"),
        ("qwen3moe.attention.head_count", list(&[4, 4, 4, 4, 4, 2]), "[4, 4, 4, 4, 4, 2]"),
        ("qwen3moe.expert_used_count", list(&[4]), "[4]"),
    ] {
        let (code, stderr) = record_with(key, value);
        assert_eq!(code, Some(2), "{stderr}");
        assert!(stderr.contains(key) && stderr.contains(expected), "{stderr}");
    }
}

#[test]
fn special_id_outside_the_vocabulary_is_a_warning() {
    let key = "tokenizer.ggml.eos_token_id";
    let (code, stderr) = record_with(key, moe_gguf::Value::U32(100_000));
    assert_eq!(code, Some(0), "{stderr}");
    let warning = stderr.lines().find(|line| line.starts_with("warning: "));
    let warning = warning.unwrap_or_else(|| panic!("{stderr}"));
    assert!(warning.contains(key) && warning.contains("100000"), "{warning}");
}

#[test]
fn records_token_ids_of_a_model_without_vocabulary() {
    let dir = tempfile::tempdir().unwrap();
    let none = moe_gguf::Value::String("none".to_owned());
    let (code, stderr) = record_in(dir.path(), &[("tokenizer.ggml.model", none)]);
    assert_ne!(code, Some(0), "{stderr}");
    assert!(stderr.contains("use token ids instead of text"), "{stderr}");
    assert!(stderr.contains("`record --prompts`"), "{stderr}");
    let lines = file_of(dir.path(), "prompts.jsonl", "{\"tokens\":[5,6,7]}\n");
    let (model, out) = (dir.path().join("m.gguf"), dir.path().join("ids"));
    run!["record", "--model", model, "--prompts", lines, "--n-predict", "3", "--out", out];
    let tokens = Run::open(&out).unwrap().manifest.unwrap().tokens;
    assert_eq!((tokens.sequences, tokens.generated), (1, 3));
}

#[test]
fn manifest_counts_the_blocks_of_an_mtp_head_as_layers() {
    let dir = tempfile::tempdir().unwrap();
    let keys = [
        ("qwen3moe.block_count", moe_gguf::Value::U32(7)),
        ("qwen3moe.nextn_predict_layers", moe_gguf::Value::U32(1)),
    ];
    let (code, stderr) = record_in(dir.path(), &keys);
    assert_eq!(code, Some(0), "{stderr}");
    let run = Run::open(dir.path().join("run")).unwrap();
    let model = &run.manifest.as_ref().unwrap().model;
    assert_eq!((model.n_layer, model.n_nextn_layer), (7, 1));
    let layers = run
        .routing()
        .filter_map(|operation| operation.head().layer());
    assert_eq!(layers.max(), Some(LayerId(5)));
    let output = run!["info", dir.path().join("run")];
    assert!(output.contains("nextn layers"), "{output}");
    // Server formats have a row for each hidden layer.
    let (run, eplb) = (dir.path().join("run"), dir.path().join("eplb.json"));
    run!["convert", run, "--to", "eplb", "--out", eplb];
    let eplb: Value = serde_json::from_slice(&fs::read(eplb).unwrap()).unwrap();
    let rows = eplb.as_array().unwrap();
    let is_routed = |row: &Value| row.as_array().unwrap().iter().any(|count| *count != 0);
    assert_eq!((rows.len(), rows.iter().all(is_routed)), (6, true));
}

#[test]
fn records_and_analyzes_every_fixture() {
    for model in
        ["tiny-qwen3moe-Q4_K_M", "tiny-gpt-oss-MXFP4", "random-qwen3moe-F16", "random-gpt-oss-F16"]
    {
        let dir = tempfile::tempdir().unwrap();
        let (run, tables) = (dir.path().join("run"), dir.path().join("tables"));
        record(&repository(&format!("fixtures/{model}.gguf")), &run);
        run!["info", run];
        run!["parquet", run, "--out", tables];
        run!["info", tables];
        let learn = dir.path().join("learn.json");
        run!["hotness", run, "--out", learn];
        moe_placement::learn::parse_observations(&fs::read_to_string(learn).unwrap()).unwrap();

        let opened = Run::open(&run).unwrap();
        let manifest = opened.manifest.as_ref().unwrap();
        let (n_layer, k) = (manifest.model.n_layer, u64::from(manifest.model.n_expert_used));
        let n_tokens = manifest.tokens.prompt + manifest.tokens.generated;
        let mut texts = Vec::new();
        for source in [&run, &tables] {
            texts.push(run!["hotness", source, "-o", "json"]);
        }
        assert_eq!(texts[0], texts[1], "{model}: a run and its tables count the same");
        let sums = sums(&serde_json::from_str::<Vec<Value>>(&texts[0]).unwrap());
        assert_eq!(sums.len() as u32, n_layer, "{model}");
        for (layer, sum) in sums {
            // In the last layer only the prompt's last token is routed, where llama.cpp prunes.
            let rows = sum / k;
            assert_eq!(sum % k, 0, "{model}, layer {layer}");
            if layer + 1 < u64::from(n_layer) {
                assert_eq!(rows, n_tokens, "{model}, layer {layer}");
            } else {
                assert!(
                    rows == n_tokens || rows == manifest.tokens.generated + 1,
                    "{model}: {rows}"
                );
            }
        }
    }
}

/// The records of a run without times and addresses, which differ between runs.
fn comparable(run: &Path) -> Vec<TensorAccessLog> {
    let run = Run::open(run).unwrap();
    let mut records = run.trace.records().to_vec();
    for record in &mut records {
        record.timestamp_ns.set(0);
        record.duration_ns.set(0);
        for source in &mut record.sources {
            source.tensor_ptr.set(0);
        }
    }
    records
}

#[test]
fn runs_are_reproducible() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = (dir.path().join("a"), dir.path().join("b"));
    let text = record(&tiny_qwen3moe(), &a);
    assert!(!text.trim().is_empty());
    assert_eq!(text, record(&tiny_qwen3moe(), &b));
    let (a, b) = (comparable(&a), comparable(&b));
    assert_eq!(a.len(), b.len());
    for (index, (a, b)) in a.iter().zip(&b).enumerate() {
        assert!(
            zerocopy::IntoBytes::as_bytes(a) == zerocopy::IntoBytes::as_bytes(b),
            "record {index}"
        );
    }
}

#[test]
fn runs_the_embedded_model_without_arguments() {
    let dir = tempfile::tempdir().unwrap();
    let assert = moe_analyze()
        .current_dir(dir.path())
        .arg("record")
        .assert()
        .success();
    assert!(!assert.get_output().stdout.is_empty());
    let runs: Vec<_> = fs::read_dir(dir.path().join("runs"))
        .unwrap()
        .map(|run| run.unwrap().path())
        .collect();
    assert_eq!(runs.len(), 1);
    let summary = run!["hotness", runs[0]];
    assert!(summary.contains("in 6 layers, 4 of 32 experts per token"), "{summary}");
    run!["info", runs[0]];
}

#[test]
fn reads_prompts_from_files() {
    let dir = tempfile::tempdir().unwrap();
    let model = tiny_qwen3moe();
    let (run, text) = (dir.path().join("run"), dir.path().join("prompt.txt"));
    fs::write(&text, format!("{PROMPT}\n")).unwrap();
    let from_file =
        run!["record", "--model", model, "--prompt-file", text, "--n-predict", "12", "--out", run];
    assert_eq!(from_file, record(&model, &dir.path().join("other")));

    let lines = dir.path().join("prompts.jsonl");
    fs::write(&lines, "{\"prompt\":\"The kernel\"}\n{\"prompt\":\"def main\",\"n_predict\":2}\n{\"tokens\":[5,6,7]}\n").unwrap();
    let many = dir.path().join("many");
    let stdout =
        run!["record", "--model", model, "--prompts", lines, "--n-predict", "3", "--out", many];
    assert_eq!(stdout, "");
    let opened = Run::open(&many).unwrap();
    let tokens = opened.manifest.unwrap().tokens;
    assert_eq!((tokens.sequences, tokens.generated), (3, 8));
    let sequences: std::collections::BTreeSet<u32> = opened
        .trace
        .records()
        .iter()
        .map(|record| record.sequence_id.get())
        .collect();
    assert_eq!(sequences.into_iter().collect::<Vec<_>>(), [0, 1, 2]);
}

#[test]
fn keeps_existing_run_without_force() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    record(&tiny_qwen3moe(), &run);
    let before = fs::read(run.join("trace.bin")).unwrap();
    let again =
        args!["record", "--prompt", "Something else", "--n-predict", "2", "--quiet", "--out", run];
    let line = fail![again];
    assert!(line.contains("--force"), "{line}");
    assert_eq!(fs::read(run.join("trace.bin")).unwrap(), before);

    run![again, "--force"];
    assert_ne!(fs::read(run.join("trace.bin")).unwrap(), before);
    run!["info", run];

    // --force does not replace a directory that is not a run.
    let precious = dir.path().join("precious");
    fs::create_dir(&precious).unwrap();
    fs::write(precious.join("thesis.txt"), "precious").unwrap();
    fail!["record", "--quiet", "--force", "--out", precious];
    assert_eq!(fs::read_to_string(precious.join("thesis.txt")).unwrap(), "precious");
}

#[test]
fn trace_limit_leaves_a_complete_run() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    run!["record", "--prompt", PROMPT, "--n-predict", "200", "--max-trace-mib", "3", "--out", run];
    assert!(fs::metadata(run.join("trace.bin")).unwrap().len() <= 3 << 20);
    run!["info", run];
    let manifest: Value =
        serde_json::from_slice(&fs::read(run.join("manifest.json")).unwrap()).unwrap();
    assert!(manifest["stopped"].is_string(), "{manifest}");
    run!["hotness", run];
}

/// A copy of a model with some bytes replaced by others of the same length, everywhere.
fn patched(dir: &Path, name: &str, from: &str, to: &str) -> PathBuf {
    assert_eq!(from.len(), to.len());
    let mut bytes = fs::read(repository("fixtures/random-qwen3moe-F16.gguf")).unwrap();
    let mut at = 0;
    while let Some(found) = bytes[at..]
        .windows(from.len())
        .position(|window| window == from.as_bytes())
    {
        at += found;
        bytes[at..at + from.len()].copy_from_slice(to.as_bytes());
    }
    let path = dir.join(name);
    fs::write(&path, bytes).unwrap();
    path
}

#[test]
fn invalid_input_exits_with_2_and_writes_no_run() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name, bytes: &[u8]| file_of(dir.path(), name, bytes);
    let whole = fs::read(repository("fixtures/random-qwen3moe-F16.gguf")).unwrap();
    let models = [
        (file("text.gguf", b"no model"), "not a GGUF file"),
        (file("empty.gguf", b""), "empty.gguf"),
        (file("header.gguf", &whole[..3000]), "header.gguf"),
        (file("short.gguf", &whole[..whole.len() - 10_000]), "short.gguf"),
        (dir.path().join("absent.gguf"), "absent.gguf"),
        (dir.path().to_owned(), arg(dir.path())),
        (patched(dir.path(), "arch.gguf", "qwen3moe", "qwen9moe"), "qwen9moe"),
    ];
    let out = dir.path().join("run");
    for (model, expected) in &models {
        let line = fail!["--quiet", "record", "--model", model, "--out", out];
        assert!(line.contains(expected), "{expected}: {line}");
        assert!(!out.exists(), "{expected}");
    }
    let unsupported = fail!["--quiet", "record", "--model", models[6].0, "--out", out];
    assert!(
        unsupported.contains("qwen3moe") && unsupported.contains("gpt-oss"),
        "lists what is supported: {unsupported}"
    );
    assert!(unsupported.contains("--engine llama.cpp"), "{unsupported}");

    let prompts = file("prompts.jsonl", b"{\"prompt\":\"a\"}\n{\"prompt\":1}\n");
    let long = file("long.txt", "word ".repeat(20_000).as_bytes());
    let nothing = file("nothing.jsonl", b"{\"tokens\":[]}\n");
    let absent = dir.path().join("absent.txt");
    let cases: [(&[&str], &str); 6] = [
        (&["--prompts", arg(&prompts)], "line 2"),
        (&["--prompt-file", arg(&absent)], "absent.txt"),
        (&["--prompt-file", arg(&long)], "context"),
        (&["--prompt", PROMPT, "--ctx-size", "4"], "context"),
        (&["--prompts", arg(&nothing)], "nothing.jsonl, line 1: \"tokens\" is empty"),
        (&["--batch-size", "0"], "--batch-size"),
    ];
    for (args, expected) in cases {
        let line = fail!["--quiet", "record", "--out", out, args];
        assert!(line.contains(expected), "{expected}: {line}");
        assert!(!out.exists(), "{expected}");
    }
}

#[test]
fn empty_prompt_needs_a_bos_token() {
    let dir = tempfile::tempdir().unwrap();
    let (spec, model) = (dir.path().join("spec.json"), dir.path().join("m.gguf"));
    let text = r#"{"arch": "qwen3moe", "n_layer": 1, "n_embd": 256, "n_head": 4, "n_expert": 8, "n_expert_used": 2,
        "n_ff_exp": 256, "vocab": {"n_tokens": 1000, "pre": "qwen2"}}"#;
    fs::write(&spec, text).unwrap();
    run!["--quiet", "synth", "--spec", spec, "--out", model];
    let line = fail!["--quiet", "record", "--model", model, "--prompt", "", "--trace", "off"];
    let expected = "the prompt is empty, and the tokenizer adds no BOS token; pass a prompt";
    assert!(line.contains(expected), "{line}");
}

/// Ctrl-C leaves a run that every other command reads. The recording would take minutes; the test waits for its first MiB.
#[cfg(unix)]
#[test]
fn interrupted_run_is_readable() {
    use std::process::{Command, Stdio};

    let dir = tempfile::tempdir().unwrap();
    let (run, prompts) = (dir.path().join("run"), dir.path().join("prompts.jsonl"));
    fs::write(&prompts, "{\"prompt\":\"The kernel driver\"}\n".repeat(100_000)).unwrap();
    let mut child = Command::new(assert_cmd::cargo::cargo_bin!("moe-analyze"))
        .args(args![
            "--quiet", "record", "--prompts", prompts, "--max-trace-mib", "20000", "--out", run
        ])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let trace = run.join("trace.bin");
    while fs::metadata(&trace).map_or(0, |trace| trace.len()) < 1 << 20 {
        assert_eq!(child.try_wait().unwrap(), None, "the recording ended");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    assert!(
        Command::new("kill")
            .args(["-TERM", &child.id().to_string()])
            .status()
            .unwrap()
            .success()
    );
    let output = child.wait_with_output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains("interrupted"), "{stderr}");
    let ends = ends(&run);
    assert_eq!(ends.last().unwrap().2, "interrupted", "{ends:?}");
    run!["info", run];
    run!["hotness", run];
    run!["parquet", run, "--out", dir.path().join("tables")];
}

/// The usage file cannot be written, because it appears while the model runs.
#[cfg(unix)]
#[test]
fn failed_usage_file_does_not_hide_the_result() {
    use std::process::{Command, Stdio};

    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    fs::write(at("prompts.jsonl"), "{\"prompt\":\"The kernel driver\"}\n".repeat(100_000)).unwrap();
    let mut child = Command::new(assert_cmd::cargo::cargo_bin!("moe-analyze"))
        .args(["record", "--prompts", "prompts.jsonl", "--out", "run"])
        .args(["--max-trace-mib", "20000", "--expert-trace-output", "usage.json"])
        .current_dir(dir.path())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    while fs::metadata(at("run/trace.bin")).map_or(0, |trace| trace.len()) < 1 << 20 {
        assert_eq!(child.try_wait().unwrap(), None, "the recording ended");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    fs::write(at("usage.json"), "theirs").unwrap();
    let kill = Command::new("kill")
        .args(["-TERM", &child.id().to_string()])
        .status();
    assert!(kill.unwrap().success());
    let output = child.wait_with_output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains("usage.json exists"), "{stderr}");
    assert!(stderr.contains("interrupted; run is complete"), "{stderr}");
    assert!(stderr.contains("generated tokens ("), "{stderr}");
    assert_eq!(fs::read_to_string(at("usage.json")).unwrap(), "theirs");
    assert_eq!(ends(&at("run")).last().unwrap().2, "interrupted");
}

/// Prompt and generated tokens of each sequence, and why it ended, in the manifest.
fn ends(run: &Path) -> Vec<(u64, u64, String)> {
    let manifest = Run::open(run).unwrap().manifest.unwrap();
    let sequences = manifest.sequences.into_iter();
    sequences
        .map(|s| (s.prompt, s.generated, s.stopped))
        .collect()
}

#[test]
fn manifest_contains_why_each_sequence_ended() {
    let dir = tempfile::tempdir().unwrap();
    let prompts = dir.path().join("prompts.jsonl");
    let lines = [
        r#"{"tokens":[5,6,7],"n_predict":1}"#,
        r#"{"tokens":[5,6,7,8],"n_predict":9}"#,
        r#"{"tokens":[5],"n_predict":0}"#,
    ];
    fs::write(&prompts, lines.join("\n")).unwrap();
    let record = |name: &str, args: &[&str]| {
        let out = dir.path().join(name);
        let own = ["record", "--ignore-eos", "--prompts", arg(&prompts), "--out", arg(&out)];
        run![own, args];
        ends(&out)
    };
    let of = |prompt, generated, stopped: &str| (prompt, generated, stopped.to_owned());
    // A context of six tokens.
    assert_eq!(
        record("context", &["--ctx-size", "6"]),
        [of(3, 1, "limit"), of(4, 2, "context"), of(1, 0, "limit")]
    );
    // A trace that ends before the second sequence does: a pass of the embedded model has more than 150 records of 1 KiB.
    let ends = record("trace", &["--max-trace-mib", "1"]);
    assert_eq!(ends.len(), 2);
    assert_eq!(ends[0], of(3, 1, "limit"));
    assert_eq!((ends[1].0, ends[1].2.as_str()), (4, "trace"));
}
