//! `accesses`: figures of a recorded run, compared with those of DuckDB on its tables, and their output formats.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use moe_testkit::python;
use serde_json::Value;

use crate::support::{ALL, arg, args, fail, known_counts, known_run, repository, run};

const TABLES: [&str; 6] = ["figures", "layers", "seeks", "working-sets", "experts", "reuse"];

fn recorded(dir: &Path, model: &str) -> PathBuf {
    let run = dir.join("run");
    let model = repository(&format!("fixtures/{model}.gguf"));
    let record = ["record", "--model", arg(&model), "--out", arg(&run), "--n-predict", "20"];
    run![record, "--prompt", "The kernel driver is responsible for"];
    run
}

#[test]
fn results_equal_those_of_duckdb() {
    let Some(python) = python("duckdb") else {
        return;
    };
    for model in ["tiny-qwen3moe-Q4_K_M", "tiny-gpt-oss-MXFP4", "random-qwen2moe-F16"] {
        let dir = tempfile::tempdir().unwrap();
        let (run, tables) = (recorded(dir.path(), model), dir.path().join("tables"));
        run!["parquet", run, "--out", tables];
        for table in TABLES {
            let out = dir.path().join(format!("{table}.json"));
            run!["accesses", run, "--table", table, "--out", out];
        }
        let witness = repository("tests/accesses/witness.py");
        let output = Command::new(&python)
            .args(args![witness, tables, run, dir.path()])
            .output()
            .unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{model}: {stderr}");
    }
}

#[test]
fn own_runs_have_no_unresolved_accesses() {
    for model in ["tiny-gpt-oss-MXFP4", "random-dots1-F16"] {
        let dir = tempfile::tempdir().unwrap();
        let run = recorded(dir.path(), model);
        let rows = run!["accesses", run, "--table", "unresolved", "-o", "json"];
        assert_eq!(serde_json::from_str::<Vec<Value>>(&rows).unwrap(), Vec::<Value>::new());
    }
}

#[test]
fn trace_of_another_recorder_yields_the_same_report() {
    let dir = tempfile::tempdir().unwrap();
    let run = recorded(dir.path(), "tiny-gpt-oss-MXFP4");
    // Plain v4, like TensorAccessLog's tracer: no extension, other indices, names of views.
    let mut bytes = fs::read(run.join("trace.bin")).unwrap();
    for record in bytes.chunks_exact_mut(1024) {
        record[857] = 0;
        let n_sources = usize::from(record[18]);
        let sources = record[152..792].chunks_exact_mut(160).take(n_sources);
        for source in sources.filter(|source| source[142] == 0) {
            let end = source.iter().position(|&byte| byte == 0).unwrap();
            source[end..end + 7].copy_from_slice(b" (view)");
            source[152..156].copy_from_slice(&7u32.to_le_bytes());
        }
    }
    let foreign = dir.path().join("tensor_trace.bin");
    fs::write(&foreign, bytes).unwrap();
    let model = repository("fixtures/tiny-gpt-oss-MXFP4.gguf");
    for table in ["seeks", "working-sets", "experts", "reuse", "unresolved"] {
        let rows = ["--table", table, "-o", "jsonl"];
        let ours = run!["accesses", run, rows];
        let given = ["accesses", arg(&foreign), "--model", arg(&model)];
        assert_eq!(run![given, rows], ours, "{table}");
    }
    // A model with the same tensor names: all tensors at other offsets are listed.
    let other = repository("fixtures/tiny-qwen3moe-Q4_K_M.gguf");
    let of_other = ["accesses", arg(&foreign), "--model", arg(&other), "--table", "unresolved"];
    let listed = run![of_other, "-o", "csv"];
    assert!(listed.contains("\nblk.0.attn_q.weight (view),"), "{listed}");
}

/// Returns a value of `figures`.
fn figure(run: &Path, figure: &str, phase: Option<&str>) -> u64 {
    let rows = run!["accesses", run, "-o", "json"];
    let rows: Vec<Value> = serde_json::from_str(&rows).unwrap();
    let is_it = |row: &&Value| row["figure"] == figure && row["phase"].as_str() == phase;
    rows.iter().find(is_it).unwrap()["value"].as_u64().unwrap()
}

#[test]
fn accesses_of_a_known_run_have_the_computed_values() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    known_run(&run);
    // One prompt pass and six tokens, six layers each.
    assert_eq!(figure(&run, "passes_in_order", None), 7);
    assert_eq!(figure(&run, "layer_steps", None), 7 * 5);
    assert_eq!(figure(&run, "tokens", Some("PROMPT")), 10);
    assert_eq!(figure(&run, "accesses", Some("GENERATE")), 6 * 6 * (1 + 3 * 4));
    let chosen = known_counts(&ALL).len() as u64;
    assert_eq!(figure(&run, "experts_touched", None), chosen);
    assert_eq!(figure(&run, "unresolved_accesses", None), 0);

    let summary = run!["accesses", run];
    assert!(
        summary.starts_with(
            "layers: accessed in order in 7 of 7 passes; 100.0 % of the changes of layer go to the next layer, 0 go back\n"
        ),
        "{summary}"
    );
    let csv = run!["accesses", run, "--table", "working-sets", "-o", "csv", "--windows", "4,1"];
    let lines: Vec<&str> = csv.lines().collect();
    assert!(lines[0].starts_with("tokens,windows,mean_bytes"), "{csv}");
    assert!(lines[1].starts_with("1,6,") && lines[2].starts_with("4,1,"), "{csv}");
}

#[test]
fn trace_without_map_needs_the_model() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    known_run(&run);
    let trace = run.join("trace.bin");
    let line = fail!["accesses", trace];
    assert!(line.contains("--model"), "{line}");
    let model = repository("fixtures/tiny-qwen3moe-Q4_K_M.gguf");
    let given = run!["accesses", trace, "--model", model, "-o", "json"];
    assert_eq!(given, run!["accesses", run, "-o", "json"]);

    let out = dir.path().join("figures.parquet");
    let line = fail!["accesses", run, "--out", out];
    assert!(line.contains("figures.parquet: the extension must be"), "{line}");
    let out = dir.path().join("figures.csv");
    fs::write(&out, "precious").unwrap();
    let line = fail!["accesses", run, "--out", out];
    assert!(line.contains("--force"), "{line}");
}
