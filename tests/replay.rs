//! `replay`: the MoE layers of a model with the routing of a trace.

use std::fs;
use std::path::{Path, PathBuf};

use moe_testkit::{Need, skip};
use moe_trace::{ExpertId, LayerId, Run, TokenId};
use serde_json::Value;

use crate::support::{
    Arg, N_GENERATED, N_LAYER, N_PROMPT, arg, args, experts_of, fail, known_run, moe_analyze,
    repository, run, write_gguf,
};

fn model() -> PathBuf {
    repository("fixtures/tiny-qwen3moe-Q4_K_M.gguf")
}

/// Rows of a replay on one thread.
fn replay(trace: &Path, model: &Path, more: &[&str]) -> Vec<Value> {
    let args = ["--quiet", "replay", arg(trace), "--model", arg(model)];
    let how = ["-t", "1", "-o", "json"];
    serde_json::from_str(&run![args, how, more]).unwrap()
}

/// `(token, sequence, layer)`, experts and weights of each token of each operation, in order.
type Routing = Vec<((TokenId, Option<u32>, Option<LayerId>), Vec<(ExpertId, Option<f32>)>)>;

fn routing(run: &Path) -> Routing {
    let run = Run::open(run).unwrap();
    let mut routing = Vec::new();
    for operation in run.routing() {
        let layer = operation.head().layer();
        for token in operation.tokens() {
            let experts = token.experts().map(|e| (e.expert_id, e.weight));
            let place = (token.token_id(), token.sequence_id(), layer);
            routing.push((place, experts.collect()));
        }
    }
    routing
}

fn u64_of(row: &Value, key: &str) -> u64 {
    row[key]
        .as_u64()
        .unwrap_or_else(|| panic!("{key} of {row}"))
}

#[test]
fn replayed_run_has_the_recorded_routing() {
    replay_of_a_record(&model());
}

/// `expert_used_count` can be a list with one number per layer.
#[test]
fn replays_layers_with_different_numbers_of_experts() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    let used = [1, 2, 3, 4, 1, 2].map(moe_gguf::Value::U32);
    let used = moe_gguf::Array::new(moe_gguf::ValueType::U32, used).unwrap();
    let key = "qwen3moe.expert_used_count";
    let like = moe_gguf::Gguf::open(model()).unwrap();
    let used = moe_gguf::Value::Array(Box::new(used));
    write_gguf(&path, Some(&like), &[(key, used)], &[]);
    let experts = replay_of_a_record(&path).into_iter();
    let used = experts.map(|((_, _, layer), experts)| (layer.unwrap().0, experts.len()));
    let used: std::collections::BTreeSet<_> = used.collect();
    assert_eq!(used, [(0, 1), (1, 2), (2, 3), (3, 4), (4, 1), (5, 2)].into());
}

/// Records a run, compares it with the records of a replay, and returns the routing.
fn replay_of_a_record(model: &Path) -> Routing {
    let dir = tempfile::tempdir().unwrap();
    let (recorded, replayed) = (dir.path().join("recorded"), dir.path().join("replayed"));
    let prompts = dir.path().join("prompts.jsonl");
    fs::write(&prompts, "{\"prompt\": \"The kernel driver\"}\n{\"tokens\": [5, 6, 7]}\n").unwrap();
    run![
        "--quiet", "record", "--model", model, "--prompts", prompts, "-n", "4", "-t", "1",
        "--batch-size", "2", "--out", recorded
    ];
    replay(&recorded, model, &["--out", arg(&replayed)]);
    let routing_of_recorded = routing(&recorded);
    assert!(!routing_of_recorded.is_empty());
    assert_eq!(routing(&replayed), routing_of_recorded);
    let manifest = Run::open(&replayed).unwrap().manifest.unwrap();
    assert_eq!(manifest.sampling.method, "none");
    assert_eq!((manifest.tokens.generated, manifest.tokens.sequences), (8, 2));
    routing_of_recorded
}

/// Does nothing on a machine with a GPU.
#[test]
fn auto_without_a_gpu_runs_on_the_cpu() {
    if moe_executor::cuda::Gpu::detect().is_ok() {
        skip(Need::NoGpu, "this machine has a GPU");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (run, replayed) = (dir.path().join("run"), dir.path().join("replayed"));
    known_run(&run);
    let model = model();
    let args = ["replay", arg(&run), "--model", arg(&model), "-t", "1"];
    let how = ["--device", "auto", "--policy", "gpu", "-o", "json"];
    let assert = moe_analyze()
        .args(args![args, how, "--out", replayed])
        .assert()
        .success();
    let stderr = String::from_utf8_lossy(&assert.get_output().stderr);
    assert!(stderr.contains("running on the CPU"), "{stderr}");
    let rows: Vec<Value> = serde_json::from_slice(&assert.get_output().stdout).unwrap();
    for row in &rows {
        let of_gpu = ["gpu_resident", "cache_miss"].map(|lane| u64_of(row, lane));
        assert_eq!(of_gpu, [0, 0], "{row}");
        assert!(u64_of(row, "cpu") > 0, "{row}");
    }
    let manifest = Run::open(&replayed).unwrap().manifest.unwrap();
    assert_eq!(manifest.policy, "cpu");
    assert!(manifest.gpu.is_none());
}

#[test]
fn rows_have_batches_tokens_bytes_and_lanes() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    known_run(&run);
    let rows = replay(&run, &model(), &[]);
    assert_eq!(rows.len(), 2 * (N_LAYER as usize + 1));
    let row = |phase: &str, layer: Option<u64>| {
        let is_it = |row: &&Value| row["phase"] == phase && row["layer_id"].as_u64() == layer;
        rows.iter().find(is_it).unwrap()
    };
    let last = row("prompt", Some(u64::from(N_LAYER - 1)));
    assert_eq!((u64_of(last, "batches"), u64_of(last, "tokens")), (1, 1));
    // Four experts of 64 × 256: gate and up in Q4_K (9216 bytes each), down in Q8_0 (17408).
    assert_eq!(u64_of(last, "bytes"), 4 * 35_840);
    let first = row("prompt", Some(0));
    let mut chosen: Vec<u32> = (0..N_PROMPT)
        .flat_map(|token| experts_of(token, 0))
        .collect();
    chosen.sort_unstable();
    chosen.dedup();
    assert_eq!((u64_of(first, "batches"), u64_of(first, "tokens")), (1, N_PROMPT.into()));
    // Here down is in Q5_0 (11264).
    assert_eq!(u64_of(first, "bytes"), chosen.len() as u64 * 29_696);

    let all = row("generate", None);
    let n = u64::from(N_GENERATED);
    assert_eq!((u64_of(all, "batches"), u64_of(all, "tokens")), (n, n));
    assert_eq!(u64_of(all, "bytes"), n * 4 * (4 * 29_696 + 2 * 35_840));
    assert_eq!(u64_of(all, "cpu"), n * 4 * u64::from(N_LAYER));
    assert_eq!(u64_of(all, "gpu_resident") + u64_of(all, "cache_miss"), 0);
    let number = |key: &str| all[key].as_f64().unwrap();
    let close = |a: f64, b: f64| assert!((a / b - 1.0).abs() < 1e-9, "{a} {b}");
    close(number("tokens_per_s"), 1e6 / number("us_per_token"));
    close(number("gb_per_s"), number("bytes") / (n as f64 * number("us_per_token")) * 1e-3);
    close(number("bandwidth_share"), number("gb_per_s") / number("bandwidth_gb_per_s"));

    let rows = replay(&run, &model(), &["--tokens", "12", "-r", "2"]);
    assert_eq!(u64_of(rows.last().unwrap(), "tokens"), 2);
}

/// A route trace of three prompt tokens and two generated ones, two experts each, in layers 1 and 4.
fn route_trace(dir: &Path, last_expert: u32) -> PathBuf {
    let mut text = String::from(
        "# route_trace v1\n# model=m.gguf arch=qwen3moe n_layer=6 n_expert=32 n_expert_used=2\n",
    );
    text += "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes\n";
    for (phase, step) in [(0, 0), (0, 1), (0, 2), (1, 3), (1, 4)] {
        for layer in [1, 4] {
            for (slot, expert) in [step, if step == 4 { last_expert } else { 9 }]
                .into_iter()
                .enumerate()
            {
                text += &format!("0,{phase},{step},{layer},{slot},{expert},0.5,0,1\n");
            }
        }
    }
    let path = dir.join("small.route.csv");
    fs::write(&path, text).unwrap();
    path
}

#[test]
fn replays_foreign_trace_with_its_number_of_experts() {
    let dir = tempfile::tempdir().unwrap();
    let trace = route_trace(dir.path(), 31);
    let run = dir.path().join("run");
    let args = ["replay", arg(&trace), "--model"];
    let model = model();
    let how = [arg(&model), "-t", "1", "-r", "1", "-b", "2", "-o", "csv", "--out", arg(&run)];
    let assert = moe_analyze().args(args![args, how]).assert().success();
    let stderr = String::from_utf8(assert.get_output().stderr.clone()).unwrap();
    assert!(stderr.contains("layers 0, 2, 3, 5 of the model are skipped"), "{stderr}");
    assert!(stderr.contains("2 experts in layer 1 of the trace, but 4 in the model"), "{stderr}");
    // Batches of two positions and of one; all layers of each in order, then two tokens.
    let places: Vec<_> = routing(&run)
        .into_iter()
        .map(|((token, _, layer), experts)| {
            let ids = experts.iter().map(|(id, _)| id.0).collect::<Vec<_>>();
            (layer.unwrap().0, token.0, ids)
        })
        .collect();
    let mut expected = Vec::new();
    for tokens in [&[0, 1][..], &[2], &[3], &[4]] {
        for layer in [1, 4] {
            let second = |token| if token == 4 { 31 } else { 9 };
            expected.extend(tokens.iter().map(|&t| (layer, t, vec![t, second(t)])));
        }
    }
    assert_eq!(places, expected);
}

#[test]
fn reports_what_cannot_be_replayed() {
    let dir = tempfile::tempdir().unwrap();
    let trace = route_trace(dir.path(), 32);
    let model = model();
    let error = fail!["--quiet", "replay", trace, "--model", model];
    assert!(error.contains("expert 32") && error.contains("line "), "{error}");

    let trace = route_trace(dir.path(), 31);
    let error = fail!["replay", trace];
    assert!(error.contains("--model"), "{error}");
    let error = fail!["replay", trace, "--model", model, "--policy", "gpu"];
    assert!(error.contains("--device"), "{error}");
    let other = repository("fixtures/random-olmoe-F16.gguf");
    let known = dir.path().join("known");
    known_run(&known);
    let error = fail!["--quiet", "replay", known, "--model", other];
    assert!(error.contains("layers") || error.contains("experts"), "{error}");

    // The second token of the prompt lacks an expert.
    let text = fs::read_to_string(&trace).unwrap();
    fs::write(&trace, text.replacen("0,0,1,1,1,9,0.5,0,1\n", "", 1)).unwrap();
    let error = fail!["--quiet", "replay", trace, "--model", model];
    assert!(error.contains("position 1 has 1 expert in layer 1"), "{error}");

    let counts = repository("fixtures/foreign/learn/new.json");
    let error = fail!["--quiet", "replay", counts, "--model", model];
    assert!(error.contains("order") || error.contains("model"), "{error}");
}

/// Starts a replay of this trace into `out`, with the default signal handlers.
#[cfg(unix)]
fn start(trace: &Path, out: &Path, more: impl Arg) -> std::process::Child {
    std::process::Command::new(assert_cmd::cargo::cargo_bin!("moe-analyze"))
        .args(args!["--quiet", "replay", trace, "--model", model()])
        .args(args!["-t", "1", "--out", out])
        .args(args![more])
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap()
}

#[cfg(unix)]
fn interrupt(child: std::process::Child) -> String {
    let kill = std::process::Command::new("kill")
        .args(["-TERM", &child.id().to_string()])
        .status();
    assert!(kill.unwrap().success());
    let output = child.wait_with_output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    stderr
}

#[cfg(unix)]
#[test]
fn replay_interrupted_while_measuring_replaces_no_run() {
    let dir = tempfile::tempdir().unwrap();
    let (run, old) = (dir.path().join("run"), dir.path().join("old"));
    known_run(&run);
    known_run(&old);
    let contents = || {
        let mut files: Vec<_> = fs::read_dir(&old)
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .map(|path| (fs::read(&path).unwrap(), path))
            .collect();
        files.sort();
        files
    };
    let before = contents();
    let new = dir.path().join("new");
    for (out, more) in [(&old, &["-r", "1000000", "--force"][..]), (&new, &["-r", "1000000"])] {
        let mut child = start(&run, out, more);
        std::thread::sleep(std::time::Duration::from_secs(2));
        assert_eq!(child.try_wait().unwrap(), None, "the replay ended");
        let stderr = interrupt(child);
        assert!(stderr.contains("interrupted"), "{stderr}");
        assert!(contents() == before);
        assert!(!new.exists());
    }
    // Rejected before anything is measured.
    let model = model();
    let args = ["--quiet", "replay", arg(&run), "--model", arg(&model)];
    let line = fail![args, "-r", "1000000", "--out", old];
    assert!(line.contains("exists"), "{line}");
}

#[cfg(unix)]
#[test]
fn replay_interrupted_while_recording_leaves_a_stopped_run() {
    let dir = tempfile::tempdir().unwrap();
    let trace = route_trace(dir.path(), 31);
    let mut text = fs::read_to_string(&trace).unwrap();
    for step in 5..20_000 {
        for layer in [1, 4] {
            for (slot, expert) in [step % 32, (step + 1) % 32].into_iter().enumerate() {
                text += &format!("0,1,{step},{layer},{slot},{expert},0.5,0,1\n");
            }
        }
    }
    fs::write(&trace, text).unwrap();
    let out = dir.path().join("out");
    let mut child = start(&trace, &out, ["-r", "1"]);
    while fs::metadata(out.join("trace.bin")).map_or(0, |trace| trace.len()) == 0 {
        assert_eq!(child.try_wait().unwrap(), None, "the replay ended");
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    let stderr = interrupt(child);
    assert!(stderr.contains("interrupted") && stderr.contains(arg(&out)), "{stderr}");
    let run = Run::open(&out).unwrap();
    let manifest = run.manifest.unwrap();
    assert_eq!(manifest.stopped.as_deref(), Some("interrupted"));
    assert_eq!(manifest.records, Some(run.trace.records().len() as u64));
}
