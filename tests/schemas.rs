//! All files and rows that the program writes conform to their descriptions in `schemas/`.

mod bodies;
mod parquet;
mod rows;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::support::{file_of, repository, run};

const MODEL: &str = "fixtures/tiny-qwen3moe-Q4_K_M.gguf";

/// Records a few tokens of [`MODEL`] to `DIR/run`.
fn recorded(dir: &Path) -> PathBuf {
    let run = dir.join("run");
    let prompt = ["--prompt", "The kernel driver is responsible for", "--n-predict", "12"];
    run!["--quiet", "record", "--model", repository(MODEL), prompt, "--out", run];
    run
}

/// The text of a file in `schemas/`.
fn text(file: &str) -> String {
    fs::read_to_string(repository("schemas").join(file)).unwrap()
}

/// Asserts that a JSON value conforms to `schemas/NAME.schema.json`.
#[track_caller]
fn validate(name: &str, value: &Value) {
    let schema: Value = serde_json::from_str(&text(&format!("{name}.schema.json"))).unwrap();
    let schema = jsonschema::validator_for(&schema).unwrap();
    let faults: Vec<String> = schema
        .iter_errors(value)
        .map(|error| error.to_string())
        .collect();
    assert!(faults.is_empty(), "{name}: {faults:?} in {value}");
}

/// A live report of the fork and the plan of its cache, for `plan --update`.
fn update_inputs(dir: &Path) -> [PathBuf; 2] {
    let schema = "llama.cpp.moe_layer_opt_perf.v1";
    let learn = json!({"schema": schema, "n_expert": 32, "layers": [
        {"layer": 0, "calls": 7, "experts": [[3, 9], [5, 4]]},
        {"layer": 2, "calls": 7, "experts": [[1, 8]]}]});
    let learn = file_of(dir, "learnt.json", learn.to_string());
    let budget = ["--budget-mib", "1", "-o", "json"];
    let plan = run!["--quiet", "plan", learn, "--model", repository(MODEL), budget];
    let plan = file_of(dir, "plan.json", plan);
    let report = json!({"enabled": true, "mode": "update", "schema": schema, "n_expert": 32, "layers": [
        {"layer": 0, "calls": 10, "hot_slots_total": 30, "cold_slots_total": 10,
         "hot_experts": [[3, 20], [5, 4]], "cold_experts": [[9, 10]]},
        {"layer": 2, "calls": 10, "hot_slots_total": 0, "cold_slots_total": 40, "cold_experts": [[7, 40]]}]});
    [file_of(dir, "report.json", report.to_string()), plan]
}

/// `schemas/README.md` lists all files of the directory, and no other.
#[test]
fn index_lists_all_schemas() {
    let files = fs::read_dir(repository("schemas")).unwrap();
    let files = files.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let files: BTreeSet<String> = files.filter(|name| name != "README.md").collect();
    let index = text("README.md");
    let listed = index.lines().filter_map(|line| line.strip_prefix("| ["));
    let listed: BTreeSet<String> = listed
        .map(|line| line.split(']').next().unwrap().to_owned())
        .collect();
    assert_eq!(files, listed);
}
