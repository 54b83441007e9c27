//! `overlap`: from the transfers of a run to figures, a verdict and a plot.

use std::fs;
use std::path::Path;

use moe_gguf::Gguf;
use moe_gguf::map::OffsetMap;
use moe_trace::manifest::{Fallbacks, Gpu, Manifest};
use moe_trace::transfers::{Span, Transfer};
use moe_trace::{LayerId, Phase, RunOptions, RunWriter, TokenId};
use serde_json::Value;

use crate::support::{arg, args, fail, known_run, moe_analyze, repository, run};

const N_LAYER: u16 = 6;
const N_PASS: u32 = 5;

/// A layer of four experts whose transfer starts with the window.
pub(crate) fn layer(
    phase: Phase,
    token_id: u32,
    layer_id: u16,
    start_ns: u64,
    transfer_ns: u64,
) -> Transfer {
    let span = |start_ns, length| Span {
        start_ns,
        end_ns: start_ns + length,
    };
    let window_ns = if phase == Phase::Prompt {
        800_000
    } else {
        100_000
    };
    Transfer {
        sequence_id: 0,
        token_id: TokenId(token_id),
        phase,
        layer_id: LayerId(layer_id),
        n_tokens: if phase == Phase::Prompt { 10 } else { 1 },
        n_experts: 4,
        n_fetched: 3,
        bytes: 1_000_000,
        transfer: Some(span(start_ns, transfer_ns)),
        window: span(start_ns, window_ns),
        product: Some(span(start_ns + transfer_ns.max(window_ns), 10_000)),
    }
}

/// A prompt with transfers of 200 µs that hide in windows of 800 µs, and decode passes with windows of 100 µs: transfers take 50 µs,
/// those of the last layer 400 µs.
pub(crate) fn example() -> Vec<Transfer> {
    let mut clock = 1_800_000_000_000_000_000;
    let mut transfers = Vec::new();
    let mut pass = |phase: Phase, token: u32| {
        for layer_id in 0..N_LAYER {
            let transfer_ns = match (phase, layer_id) {
                (Phase::Prompt, _) => 200_000,
                (_, 5) => 400_000,
                _ => 50_000,
            };
            transfers.push(layer(phase, token, layer_id, clock, transfer_ns));
            clock += 1_000_000;
        }
    };
    pass(Phase::Prompt, 0);
    (10..10 + N_PASS).for_each(|token| pass(Phase::Generate, token));
    transfers
}

/// A run of the qwen3moe fixture with these transfers.
pub(crate) fn recorded(dir: &Path, transfers: &[Transfer]) {
    let gguf = Gguf::open(repository("fixtures/tiny-qwen3moe-Q4_K_M.gguf")).unwrap();
    let manifest = Manifest {
        policy: "post-fetch".into(),
        gpu: Some(Gpu {
            name: "GPU".into(),
            memory_bytes: 16 << 30,
            limit_bytes: Some(4 << 30),
            peak_bytes: Some(3 << 30),
            scratchpad_bytes: Some(64 << 20),
            fallbacks: Some(Fallbacks {
                operations: 2,
                tensors: 0,
                first_error: Some("no memory".into()),
            }),
            ..Gpu::default()
        }),
        ..Manifest::default()
    };
    let map = OffsetMap::new(&gguf);
    let mut writer = RunWriter::create(dir, manifest, &map, RunOptions::default()).unwrap();
    writer.write_transfers(transfers).unwrap();
    writer.finish().unwrap();
}

fn rows(args: &[&str]) -> Vec<Value> {
    let text = run!["overlap", args, "-o", "json"];
    serde_json::from_str(&text).unwrap()
}

#[track_caller]
fn assert_close(found: &Value, expected: f64) {
    let found = found.as_f64().expect("a number");
    assert!((found - expected).abs() < 1e-6 * expected.abs().max(1.0), "{found} {expected}");
}

#[test]
fn reports_and_ignores_truncated_last_line() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    recorded(&run, &example());
    let whole = rows(&[arg(&run)]);
    let path = run.join("transfers.jsonl");
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, format!("{text}{{\"sequence_id\":0,")).unwrap();
    for input in [&run, &path] {
        let output = moe_analyze()
            .args(args!["overlap", input, "-o", "json"])
            .output()
            .unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        let place = format!("transfers.jsonl is truncated: its last line, at byte {}", text.len());
        assert!(stderr.contains(&place), "{stderr}");
    }
    assert_eq!(rows(&[arg(&run)]), whole);
}

#[test]
fn prints_rows_of_layers_and_phases() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    recorded(&run, &example());
    let all = rows(&[arg(&run)]);
    assert_eq!(all.len(), 2 * (usize::from(N_LAYER) + 1));
    let generated = rows(&[arg(&run), "--phase", "generate"]);
    assert_eq!(generated, all[usize::from(N_LAYER) + 1..]);
    assert!(generated.iter().all(|row| row["phase"] == "GENERATE"));

    let first = &generated[0];
    assert_eq!((&first["layer_id"], &first["runs"]), (&0.into(), &N_PASS.into()));
    assert_close(&first["window_mean_us"], 100.0);
    assert_close(&first["transfer_p95_us"], 50.0);
    assert_close(&first["hidden_pct"], 100.0);
    assert_close(&first["overlap_mean_us"], 50.0);
    assert_eq!(first["scratchpad_bytes"], 64 << 20);
    assert_close(&first["scratchpad_pct"], 100.0 * 64.0 / 4096.0);
    assert_close(&first["fallback_pct"], 25.0);
    assert_close(&first["link_gb_s"], 20.0);
    assert_eq!(first["verdict"], "hidden");
    let last = &generated[5];
    assert_close(&last["hidden_pct"], 25.0);
    assert_close(&last["overlap_mean_us"], 100.0);
    assert_close(&last["hideable_pct"], 25.0);
    assert_close(&last["fitting_pct"], 0.0);
    assert_close(&last["stall_mean_us"], 300.0);
    assert_eq!(last["verdict"], "too_long");
    let whole = &generated[6];
    assert_eq!(whole["layer_id"], Value::Null);
    // Of 650 µs, 5 × 50 µs and 100 of 400 µs are inside windows.
    assert_close(&whole["hidden_pct"], 100.0 * 350.0 / 650.0);
    assert_eq!(whole["bytes"], 30_000_000);
}

#[test]
fn prints_used_memory_bandwidth() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    recorded(&run, &example());
    let model = repository("fixtures/tiny-qwen3moe-Q4_K_M.gguf");
    // An expert of layer 0 has gate and up of 64 × 256 weights each in Q4_K, 144 bytes for 256 of them.
    let gate_up_gb_s = 4.0 * 2.0 * (64.0 * 144.0) / 100e-6 * 1e-9;
    let transfers = run.join("transfers.jsonl");
    let args = ["--phase", "generate", "--memory-gb-s", "1"];
    for (path, model) in [(&run, None), (&transfers, Some(&model))] {
        let model: Vec<&str> = model
            .iter()
            .flat_map(|model| ["--model", arg(model)])
            .collect();
        let row = &rows(&[&[arg(path)], &args[..], &model].concat())[0];
        assert_close(&row["gate_up_gb_s"], gate_up_gb_s);
        assert_close(&row["memory_pct"], 100.0 * gate_up_gb_s);
        // All 1,000,000 bytes are copied within the 100 µs.
        assert_close(&row["memory_with_transfers_pct"], 100.0 * (gate_up_gb_s + 10.0));
        assert_eq!(row["verdict"], "bandwidth_saturated");
    }
    let assert = moe_analyze()
        .args(args!["overlap", transfers, "--memory-gb-s", "1", "-o", "csv"])
        .assert()
        .success();
    let note = String::from_utf8_lossy(&assert.get_output().stderr).into_owned();
    assert!(note.contains("--model"), "{note}");
}

#[test]
fn summary_contains_the_verdict() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    recorded(&run, &example());
    let text = run!["overlap", run];
    for line in [
        "prompt tokens: hidden: 100.0 % of the transfer time is hidden behind gate and up",
        "generated tokens: too long: a transfer takes 108.3 µs but gate and up only 100.0 µs, so at most 53.8 %",
        "5 passes × 6 layers: 28.6 MiB transferred at 9.2 GB/s; the CPU computed the down product of 25.0 % of",
        "GPU: scratchpad 64.0 MiB, 1.56 % of 4.0 GiB of GPU memory",
        "GPU: peak memory 3.0 GiB",
        "GPU: the CPU ran 2 operations instead of the GPU, and 0 tensors did not fit into GPU memory; first error: no memory",
    ] {
        assert!(text.contains(line), "{line}\n{text}");
    }
}

#[test]
fn draws_plots() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    recorded(&run, &example());
    let svg = dir.path().join("a.svg");
    run!["overlap", run, "--plot", svg];
    let text = fs::read_to_string(&svg).unwrap();
    // The prompt pass is the first, but not a decode pass.
    assert!(
        text.contains("run, pass 3 (of 0 to 5): 1 token of sequence 0 at position 12"),
        "{text}"
    );
    let png = dir.path().join("a.png");
    run!["overlap", run, "--plot", png, "--pass", "0"];
    assert!(fs::read(&png).unwrap().starts_with(b"\x89PNG"));
    let error = fail!["overlap", run, "--plot", png];
    assert!(error.contains("--force"), "{error}");
    let args = ["--force", "--pass", "6"];
    let error = fail!["overlap", run, "--plot", png, args];
    assert!(error.contains("--pass 6 is out of range (0..=5)"), "{error}");
    fail!["overlap", run, "--plot", "a.gif"];
    fail!["overlap", run, "--pass", "0"];
}

#[test]
fn reports_missing_and_damaged_inputs() {
    let dir = tempfile::tempdir().unwrap();
    let cpu = dir.path().join("cpu");
    known_run(&cpu);
    let how = "--device cuda --policy post-fetch";
    let error = fail!["overlap", cpu];
    assert!(error.contains("transfers.jsonl") && error.contains(how), "{error}");
    let run = dir.path().join("run");
    recorded(&run, &[]);
    let error = fail!["overlap", run];
    assert!(error.contains(how), "{error}");
    fail!["overlap", dir.path().join("nowhere")];

    let run = dir.path().join("whole");
    recorded(&run, &example());
    let file = run.join("transfers.jsonl");
    let good = fs::read_to_string(&file).unwrap();
    // The recorder was killed, so the last line is truncated.
    fs::write(&file, &good[..good.len() - 30]).unwrap();
    let truncated = rows(&[arg(&run), "--phase", "generate"]);
    assert_eq!(truncated[5]["runs"], N_PASS - 1);
    let damaged = good.replacen("\"n_fetched\":3", "\"n_fetched\":9", 2);
    fs::write(&file, damaged).unwrap();
    let error = fail!["overlap", run];
    assert!(error.contains("line 1") && error.contains("transfers.jsonl"), "{error}");
    fs::write(&file, "{\"window\":1}\n").unwrap();
    let error = fail!["overlap", run];
    assert!(error.contains("line 1"), "{error}");
    for list in ["[[1]]", "[1, 2]"] {
        fs::write(&file, list).unwrap();
        let error = fail!["overlap", run];
        assert!(error.contains("line 1: a list instead of an object"), "{error}");
    }
    fs::remove_file(&file).unwrap();
    fs::create_dir(&file).unwrap();
    let error = fail!["overlap", run];
    assert!(error.contains("cannot open") && error.contains("transfers.jsonl"), "{error}");
    let report = dir.path().join("report.html");
    moe_analyze()
        .args(args!["--quiet", "report", run, "--out", report])
        .assert()
        .code(2);
    assert!(!report.exists());
    fs::remove_dir(&file).unwrap();
    let only: String = good
        .lines()
        .skip(6)
        .map(|line| format!("{line}\n"))
        .collect();
    fs::write(&file, only).unwrap();
    let error = fail!["overlap", run, "--phase", "prompt"];
    assert!(error.contains("prompt"), "{error}");
}
