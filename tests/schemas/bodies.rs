//! JSON documents, and files of JSON lines.

use std::fs;

use serde_json::Value;

use super::{MODEL, recorded, update_inputs, validate};
use crate::support::{args, file_of, moe_analyze, repository, run};

fn parse(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

#[test]
fn run_directory() {
    let dir = tempfile::tempdir().unwrap();
    let run = recorded(dir.path());
    let read = |name: &str| fs::read_to_string(run.join(name)).unwrap();
    validate("run", &parse(&read("manifest.json")));
    for graph in ["graph/prompt.json", "graph/generate.json"] {
        validate("graph", &parse(&read(graph)));
    }
    let buffers = read("buffers.jsonl");
    assert!(buffers.lines().count() > 0);
    for line in buffers.lines() {
        validate("buffers", &parse(line));
    }
    let replayed = dir.path().join("replayed");
    run!["--quiet", "replay", run, "--model", repository(MODEL), "-t", "1", "--out", replayed];
    validate("run", &parse(&fs::read_to_string(replayed.join("manifest.json")).unwrap()));
    let chat = dir.path().join("chat");
    let template = repository("fixtures/prompts/turns.jinja");
    let with_chat = ["--quiet", "record", "-n", "1", "--chat"];
    run![with_chat, "--chat-template", template, "--out", chat];
    validate("run", &parse(&fs::read_to_string(chat.join("manifest.json")).unwrap()));
    let compressed = dir.path().join("compressed");
    run!["--quiet", "record", "-n", "30", "--compress-trace", "--out", compressed];
    let manifest = parse(&fs::read_to_string(compressed.join("manifest.json")).unwrap());
    assert!(manifest["expansion"].is_object());
    validate("run", &manifest);
    let cached = dir.path().join("cached");
    let cache = args!["--policy", "hot-cache", "--hot-cache", run, "--hot-cache-mib", "1,1"];
    for perf in ["off", "update", "full"] {
        let how = ["--force", "-n", "4", "--perf", perf];
        let model = repository(MODEL);
        run!["--quiet", "record", "--model", model, how, cache, "--out", cached];
        for (schema, file) in [("run", "manifest.json"), ("perf", "perf.json")] {
            validate(schema, &parse(&fs::read_to_string(cached.join(file)).unwrap()));
        }
    }
    let cache = args!["--policy", "dynamic", "--hot-cache-mib", "1"];
    for options in [&[][..], &["--predictor", "markov", "--prefetch-experts", "2"]] {
        let how = args!["--force", "-n", "4", cache, options];
        run!["--quiet", "record", "--model", repository(MODEL), how, "--out", cached];
        for (schema, file) in [("run", "manifest.json"), ("perf", "perf.json")] {
            validate(schema, &parse(&fs::read_to_string(cached.join(file)).unwrap()));
        }
    }
    let with_transfers = dir.path().join("transfers");
    crate::overlap::recorded(&with_transfers, &crate::overlap::example());
    let transfers = fs::read_to_string(with_transfers.join("transfers.jsonl")).unwrap();
    for line in transfers.lines() {
        validate("transfers", &parse(line));
    }
}

#[test]
fn outputs_of_commands() {
    let dir = tempfile::tempdir().unwrap();
    let run = recorded(dir.path());
    let model = repository(MODEL);
    let phase = ["--phase", "prompt", "-o", "json"];
    validate("graph", &parse(&run!["--quiet", "graph", run, phase]));
    validate("graph", &parse(&run!["--quiet", "graph", run, "--from-records", phase]));
    let timeline = dir.path().join("timeline.json");
    run!["--quiet", "buffers", run, "--out", timeline];
    validate("timeline", &parse(&fs::read_to_string(timeline).unwrap()));
    validate("expert-usage", &parse(&run!["--quiet", "hotness", run, "--usage", "-o", "json"]));
    let learn = dir.path().join("learn.json");
    run!["--quiet", "hotness", run, "--out", learn];
    validate("learn", &parse(&fs::read_to_string(&learn).unwrap()));
    let plan = args!["--quiet", "plan", learn, "--model", model, "--budget-mib", "1", "-o", "json"];
    validate("plan", &parse(&run![plan, "--explain", "0:0"]));
    for verify in [&[][..], &["--verify"]] {
        let report = args!["--quiet", "gguf-map", model, "--format", "report", verify];
        validate("map-report", &parse(&run![report]));
    }
    let tables = dir.path().join("tables");
    run!["--quiet", "parquet", run, "--out", tables];
    let foreign = repository("fixtures/simulate/mixed.route.csv");
    for path in [run, model, learn, tables.join("ops.parquet"), tables, foreign] {
        validate("info", &parse(&run!["--quiet", "info", path, "-o", "json"]));
    }
}

#[test]
fn reports_of_a_truncated_model() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = fs::read(repository(MODEL)).unwrap();
    let model = file_of(dir.path(), "truncated.gguf", &bytes[..bytes.len() - 100]);
    let report = moe_analyze()
        .args(args!["gguf-map", model, "--format", "report"])
        .output()
        .unwrap();
    let report: Value = serde_json::from_slice(&report.stdout).unwrap();
    assert_ne!(report["check"]["past_end"], Value::Array(Vec::new()));
    validate("map-report", &report);
    let info = moe_analyze()
        .args(args!["info", model, "-o", "json"])
        .output()
        .unwrap();
    validate("info", &serde_json::from_slice(&info.stdout).unwrap());
}

#[test]
fn update_of_a_plan() {
    let dir = tempfile::tempdir().unwrap();
    let [report, plan] = update_inputs(dir.path());
    let update = parse(&run!["--quiet", "plan", report, "--update", plan, "-o", "json"]);
    validate("plan-update", &update);
    assert_ne!(update["exchanged"], 0);
}
