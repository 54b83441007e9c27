//! Updates of a running cache.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use super::{QWEN, json_of, plan_of, workplace, write};
use crate::support::{args, fail, repository, run};

/// Expert 9 has more activations than the cached 5 and replaces it; the rate allows one of two exchanges.
#[test]
fn plans_updates() {
    let dir = workplace();
    let (learn, model) = (dir.path().join("learn.json"), repository(QWEN));
    let plan = run![plan_of(&learn, &model), "-o", "json"];
    let plan = write(&dir, "plan.json", &plan);
    let live = |enabled: bool| {
        json!({"enabled": enabled, "mode": "update", "schema": "llama.cpp.moe_layer_opt_perf.v1", "n_expert": 32,
            "layers": [
                {"layer": 0, "calls": 10, "hot_slots_total": 30, "cold_slots_total": 10,
                 "hot_experts": [[3, 20], [5, 4], [6, 6]], "cold_experts": [[9, 10]]},
                {"layer": 2, "calls": 10, "hot_slots_total": 0, "cold_slots_total": 40, "cold_experts": [[7, 40]]}]})
        .to_string()
    };
    let report = write(&dir, "live.json", &live(true));
    let update = |current: &Path, more: &[&str]| {
        json_of(args!["plan", report, "--update", current, "-o", "json", more])
    };
    let all = update(&plan, &[]);
    let swaps = |update: &Value| -> Vec<Value> {
        let exchanges = update["exchanges"].as_array().unwrap().iter();
        exchanges
            .map(|e| json!([e["layer"], e["evict"], e["add"]]))
            .collect()
    };
    // `flat` scores: in layer 2 expert 7 replaces the unused 1; in layer 0 expert 9 is second of four.
    assert_eq!(swaps(&all), [json!([2, 1, 7]), json!([0, 5, 9])]);
    assert_eq!(all["exchanges"][0]["gain"], 4_000_040);
    assert_eq!(all["exchanges"][1]["gain"], 3_000_010 - 1_000_004);
    assert_eq!(all["hit_rate"], 0.375);
    assert_eq!(
        (&all["hot_experts"], &all["candidates"], &all["exchanged"], &all["layers_changed"]),
        (&json!(4), &json!(2), &json!(2), &json!(2))
    );
    // A quarter of four cached experts is one.
    assert_eq!(swaps(&update(&plan, &["--update-rate", "0.25"])), [json!([2, 1, 7])]);
    assert_eq!(update(&plan, &["--update-rate", "-1"])["exchanged"], 0);
    // A learn file also describes a cache.
    assert_eq!(update(&learn, &[]), all);
    // In a report, the experts that served a slot are in the cache: 3, 5 and 6 of layer 0.
    assert_eq!(swaps(&update(&report, &[])), [json!([0, 5, 9])]);
    let table = run!["plan", report, "--update", plan];
    assert!(
        table.contains("2 of 2 exchanges") && table.contains("37.5 % of 80 selected experts"),
        "{table}"
    );

    let rate = ["--update-rate", "nan"];
    let error = fail!["plan", report, "--update", plan, rate];
    assert!(error.contains("expected a number"), "{error}");
    let missing = dir.path().join("missing.json");
    let error = fail!["plan", report, "--update", missing];
    assert_eq!(error.matches("No such file").count(), 1, "{error}");

    // Recording is disabled: the fork exchanges no expert.
    fs::write(&report, live(false)).unwrap();
    assert_eq!(update(&plan, &[])["exchanged"], 0);
}
