//! `convert --to perfetto`: `check_perfetto.py` decodes the output with Perfetto's definitions and compares it with the run, and
//! Perfetto's trace processor reads it.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use moe_testkit::{Need, python, skip};
use moe_trace::transfers::{Span, Transfer};
use moe_trace::{LayerId, Phase, TokenId};

use crate::support::{args, fail, known_run, moe_analyze, repository, run};

const MODEL: &str = "fixtures/tiny-qwen3moe-Q4_K_M.gguf";

/// Start of the known run.
const START_NS: u64 = 1_000_000;

/// Transfers in two layers of the known run. The second layer has no copy, the third has no product.
fn transfers() -> [Transfer; 3] {
    let span = |start_ns: u64, end_ns: u64| Span {
        start_ns: START_NS + start_ns,
        end_ns: START_NS + end_ns,
    };
    let first = Transfer {
        sequence_id: 0,
        token_id: TokenId(0),
        phase: Phase::Prompt,
        layer_id: LayerId(0),
        n_tokens: 10,
        n_experts: 4,
        n_fetched: 3,
        bytes: 30_000,
        transfer: Some(span(900, 2_900)),
        window: span(1_000, 2_500),
        product: Some(span(3_000, 3_400)),
    };
    [
        first.clone(),
        Transfer {
            layer_id: LayerId(1),
            n_fetched: 0,
            bytes: 0,
            transfer: None,
            window: span(5_000, 6_500),
            product: None,
            ..first.clone()
        },
        Transfer {
            layer_id: LayerId(2),
            n_fetched: 0,
            transfer: Some(span(8_900, 10_000)),
            window: span(9_000, 10_500),
            product: None,
            ..first
        },
    ]
}

/// The known run, and the known run with transfers.
fn known_runs(dir: &Path) -> [PathBuf; 2] {
    let runs = ["known", "post-fetch"].map(|name| dir.join(name));
    runs.iter().for_each(|run| known_run(run));
    let line = |transfer: &Transfer| serde_json::to_string(transfer).unwrap() + "\n";
    let lines: String = transfers().iter().map(line).collect();
    fs::write(runs[1].join("transfers.jsonl"), lines).unwrap();
    runs
}

/// Runs without a cache, with a hot cache and with a dynamic cache.
fn recorded_runs(dir: &Path) -> [PathBuf; 3] {
    let runs = ["first", "hot", "dynamic"].map(|name| dir.join(name));
    let [first, hot, dynamic] = &runs;
    let record = args!["--quiet", "record", "--model", repository(MODEL), "-n", "4"];
    run![record, "--prompt", "The kernel driver", "--out", first];
    let learn = dir.join("learn.json");
    run!["--quiet", "hotness", first, "--out", learn];
    let prompt = ["--prompt", "int main(", "--hot-cache-mib", "1"];
    run![record, prompt, "--policy", "hot-cache", "--hot-cache", learn, "--out", hot];
    run![record, prompt, "--policy", "dynamic", "--out", dynamic];
    runs
}

/// Converts a run, and returns the output and the notes.
fn convert(run: &Path) -> (PathBuf, String) {
    let out = run.with_extension("pftrace");
    let assert = moe_analyze()
        .args(args!["convert", run, "--to", "perfetto", "--out", out])
        .assert()
        .success();
    let notes = String::from_utf8(assert.get_output().stderr.clone()).unwrap();
    assert!(notes.contains("(perfetto)"), "{notes}");
    (out, notes)
}

#[test]
fn perfetto_decodes_the_operations_of_a_run() {
    let Some(python) = python("perfetto.protos.perfetto.trace.perfetto_trace_pb2") else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let check = |run: &Path| {
        let (out, _) = convert(run);
        let script = repository("tests/check_perfetto.py");
        let output = Command::new(&python)
            .args(args![script, run, out])
            .output()
            .unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{}: {stderr}", run.display());
        String::from_utf8(output.stdout).unwrap()
    };
    let [known, post_fetch] = known_runs(dir.path());
    // Four operations in each of six layers.
    assert_eq!(check(&known), "7 passes, 168 operations, 0 flows, as in the run\n");
    assert_eq!(check(&post_fetch), "7 passes, 168 operations, 1 flows, as in the run\n");
    for run in recorded_runs(dir.path()) {
        // The prompt and four generated tokens.
        let checked = check(&run);
        assert!(checked.starts_with("5 passes, "), "{checked}");
    }
}

/// Path of Perfetto's trace processor: `MOE_TRACE_PROCESSOR`, or in a directory of `PATH`.
fn trace_processor() -> Option<OsString> {
    let named = std::env::var_os("MOE_TRACE_PROCESSOR");
    let names = ["trace_processor_shell", "trace_processor"].map(OsString::from);
    let mut candidates = named.into_iter().chain(names);
    candidates.find(|program| {
        let output = Command::new(program).arg("--version").output();
        output.is_ok_and(|output| output.status.success())
    })
}

#[test]
fn trace_processor_reads_the_trace_without_errors() {
    let Some(program) = trace_processor() else {
        skip(
            Need::TraceProcessor,
            "there is no trace_processor_shell in PATH; set MOE_TRACE_PROCESSOR to its path",
        );
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let [_, run] = known_runs(dir.path());
    let (out, _) = convert(&run);
    let query = dir.path().join("query.sql");
    fs::write(
        &query,
        "SELECT 'passes=' || (SELECT COUNT(*) FROM slice WHERE category = 'pass')
            || ' operations=' || (SELECT COUNT(*) FROM slice WHERE category = 'operation')
            || ' deepest=' || (SELECT MAX(depth) FROM slice)
            || ' flows=' || (SELECT COUNT(*) FROM flow)
            || ' counters=' || (SELECT COUNT(DISTINCT track_id) FROM counter)
            || ' unfinished=' || (SELECT COUNT(*) FROM slice WHERE dur < 0)
            || ' errors=' || (SELECT COALESCE(SUM(value), 0) FROM stats WHERE severity = 'error') AS line;",
    )
    .unwrap();
    let output = Command::new(program)
        .args(args!["-q", query, out])
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    let stdout = String::from_utf8_lossy(&output.stdout);
    // Counters: copies, selected experts; the known run has no buffers.
    let expected = "passes=7 operations=168 deepest=1 flows=1 counters=2 unfinished=0 errors=0";
    assert!(stdout.contains(expected), "{stdout}");
}

#[test]
fn refuses_traces_without_times_and_foreign_files() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out.pftrace");
    let foreign = |name: &str| repository("fixtures/foreign").join(name);
    for name in ["bigmoeonedge/small.route.csv", "learn/new.json"] {
        let error = fail!["--quiet", "convert", foreign(name), "--to", "perfetto", "--out", out];
        let reason = "perfetto needs the times of operations, which the trace does not contain; use a run directory or a trace.bin";
        assert!(error.contains(reason), "{error}");
        assert!(!out.exists());
    }
    // A trace of another tool with every operation.
    let thesis = args!["--quiet", "convert", foreign("thesis/small.bin"), "--to", "perfetto"];
    run![thesis, "--out", out];
    assert!(fail![thesis, "--out", out].contains("--force"));
    run![thesis, "--out", out, "--force"];
    // A Perfetto trace of another program: a packet with a timestamp.
    fs::write(&out, [0x0a, 2, 0x40, 1]).unwrap();
    let error = fail![thesis, "--out", out, "--force"];
    assert!(error.contains("has another format than perfetto"), "{error}");
}

#[test]
fn reports_lost_information() {
    let dir = tempfile::tempdir().unwrap();
    let [run, _] = known_runs(dir.path());
    let (_, notes) = convert(&run);
    let loss = "  addresses, sources and the experts of each token of a batch are lost\n";
    assert!(notes.ends_with(loss), "{notes}");
}
