//! `graph` and `buffers`: from a recorded run to DOT, JSON and a plot.

use std::fs;
use std::path::{Path, PathBuf};

use moe_trace::Manifest;
use serde_json::Value;

use crate::support::{arg, args, fail, known_run, repository, run};

fn recorded(dir: &Path) -> PathBuf {
    let run = dir.join("run");
    let model = repository("fixtures/tiny-gpt-oss-MXFP4.gguf");
    let prompt = ["--prompt", "The kernel driver", "--n-predict", "3"];
    let record = args!["record", "--model", model, "--out", run, prompt];
    run![record];
    run
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

/// Names of the nodes that operations write, in order.
fn operations(graph: &Value) -> Vec<(String, String)> {
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let nodes = graph["nodes"].as_array().unwrap().iter();
    nodes
        .filter(|node| node["operation"] != "CONST")
        .map(|node| (text(&node["operation"]), text(&node["label"])))
        .collect()
}

#[test]
fn recorded_graph_equals_reconstructed_graph() {
    let dir = tempfile::tempdir().unwrap();
    let run = recorded(dir.path());
    for phase in ["prompt", "decode"] {
        let graph = ["graph", arg(&run), "--phase", phase];
        let written = json(&run![graph, "-o", "json"]);
        let made = json(&run![graph, "-o", "json", "--from-records"]);
        assert_eq!(operations(&written), operations(&made));
        // The sinks of attention are a fifth source, which a record does not contain.
        let n = |graph: &Value, what: &str| graph["metadata"][what].as_u64().unwrap();
        let n_layer = 6;
        for what in ["total_nodes", "total_edges"] {
            assert_eq!(n(&written, what), n(&made, what) + n_layer);
        }
        assert_eq!(n(&made, "layers"), n_layer);
        let dot = run![graph];
        assert_eq!(dot.matches(" -> ").count() as u64, n(&written, "total_edges"));
    }
    let out = dir.path().join("graph.json");
    run!["graph", run, "--out", out];
    assert_eq!(json(&fs::read_to_string(&out).unwrap())["phase"], "GENERATE");
    let line = fail!["graph", run, "--out", out];
    assert!(line.contains("--force"), "{line}");
    let line = fail!["graph", run, "--out", dir.path().join("graph.svg")];
    assert!(line.contains("graph.svg: the extension must be .dot"), "{line}");
}

#[test]
fn reconstructs_graph_of_a_trace_without_manifest() {
    let dir = tempfile::tempdir().unwrap();
    known_run(&dir.path().join("run"));
    let trace = dir.path().join("run/trace.bin");
    let graph = json(&run!["graph", trace, "-o", "json", "--phase", "prompt"]);
    let operations = operations(&graph);
    assert_eq!(operations.len(), 6 * 4);
    assert_eq!(operations[1], ("MUL_MAT_ID".into(), "ffn_moe_gate-0".into()));
    let line = fail!["graph", repository("fixtures/random-qwen3moe-F16.gguf")];
    assert!(line.contains("is not a run"), "{line}");
}

#[test]
fn lists_sums_and_plots_buffers() {
    let dir = tempfile::tempdir().unwrap();
    let run = recorded(dir.path());
    let (out, plot) = (dir.path().join("timeline.json"), dir.path().join("memory.svg"));
    let args = ["buffers", arg(&run), "--out", arg(&out), "--plot", arg(&plot), "-o", "json"];
    let rows = json(&run![args]);
    let timeline = json(&fs::read_to_string(&out).unwrap());
    assert_eq!(rows.as_array().unwrap().len(), timeline["buffers"].as_array().unwrap().len());

    // The peak, computed from the events.
    let events = fs::read_to_string(run.join("buffers.jsonl")).unwrap();
    let mut sizes = std::collections::BTreeMap::new();
    let mut peak = 0;
    for event in events.lines().map(json) {
        let id = event["buffer_id"].as_u64().unwrap();
        match event["event"].as_str().unwrap() {
            "alloc" => sizes.insert(id, event["size"].as_u64().unwrap()),
            _ => sizes.remove(&id),
        };
        peak = peak.max(sizes.values().sum::<u64>());
    }
    assert_eq!(timeline["metadata"]["peak_occupancy_bytes"].as_u64(), Some(peak));
    let model = fs::metadata(repository("fixtures/tiny-gpt-oss-MXFP4.gguf"))
        .unwrap()
        .len();
    let is_model = |row: &&Value| row["backend"] == "mmap" && row["size"] == model;
    assert_eq!(rows.as_array().unwrap().iter().filter(is_model).count(), 1);
    let svg = fs::read_to_string(&plot).unwrap();
    assert!(svg.contains("Memory of buffers over time") && svg.contains("without the weights"));

    let summary = run!["buffers", run.join("buffers.jsonl")];
    assert!(summary.contains(&format!("({peak} bytes)")), "{summary}");
}

/// The recorder was killed while it replaced a run; some files of the old run are left.
#[test]
fn rejects_partially_replaced_run() {
    let dir = tempfile::tempdir().unwrap();
    let run = recorded(dir.path());
    fs::write(run.join("transfers.jsonl"), "").unwrap();
    let path = run.join("manifest.json");
    let mut manifest = Manifest::read(&path).unwrap();
    manifest.replacing = true;
    manifest.write(&path).unwrap();
    for command in ["graph", "buffers", "overlap", "accesses", "hotness", "info"] {
        let line = fail![command, run];
        assert!(line.contains("was killed while it replaced this run"), "{command}: {line}");
    }
    let line = fail!["graph", run, "--phase", "prompt", "--from-records"];
    assert!(line.contains("was killed while it replaced this run"), "{line}");
    run!["graph", run.join("trace.bin")];
}

#[test]
fn reports_run_without_buffer_events() {
    let dir = tempfile::tempdir().unwrap();
    known_run(dir.path());
    let line = fail!["buffers", dir.path()];
    assert!(line.contains("no buffer events"), "{line}");
    fs::remove_file(dir.path().join("buffers.jsonl")).unwrap();
    let line = fail!["buffers", dir.path()];
    assert!(line.contains("has no buffers.jsonl"), "{line}");
    #[cfg(unix)]
    {
        let events = dir.path().join("buffers.jsonl");
        std::os::unix::fs::symlink("buffers.jsonl", &events).unwrap();
        let line = fail!["buffers", dir.path()];
        assert!(line.contains("cannot open") && line.contains("buffers.jsonl"), "{line}");
        fs::remove_file(events).unwrap();
    }
    fs::write(dir.path().join("buffers.jsonl"), "{\n").unwrap();
    let line = fail!["buffers", dir.path()];
    assert!(line.contains("buffers.jsonl: line 1: "), "{line}");
}
