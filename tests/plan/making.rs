//! Plans: results of the fork, sizes, defaults, several files, and the learn file of the plan.

use std::fs;

use serde_json::{Value, json};
use tempfile::TempDir;

use super::{GPT_OSS, GPT_OSS_EXPERT, QWEN, json_of, plan_of, planned, selected, workplace, write};
use crate::support::{self, arg, args, fail, moe_analyze, repository, run};

#[test]
fn accepts_byte_order_marks() {
    let dir = workplace();
    let learn = dir.path().join("learn.json");
    let sizes = write(&dir, "sizes.csv", "layer,expert,bytes\n0,3,9\n0,5,9\n0,6,9\n2,1,9\n");
    let plan = || {
        let args = ["plan", arg(&learn), "--sizes", arg(&sizes), "--budget-bytes", "100"];
        run![args, "-o", "csv"]
    };
    let expected = plan();
    for path in [&learn, &sizes] {
        let text = fs::read_to_string(path).unwrap();
        fs::write(path, format!("\u{feff}{text}")).unwrap();
    }
    assert_eq!(plan(), expected);
    let hotness = run!["hotness", learn, "-o", "csv"];
    assert!(hotness.lines().count() > 1, "{hotness}");
}

/// Results of the fork's parser, weighting and planner.
#[test]
fn plans_equal_those_of_the_fork() {
    let dir = TempDir::new().unwrap();
    let cases = moe_testkit::reference::read("hot-cache-plans");
    let cases: Vec<Value> = serde_json::from_slice(&cases).unwrap();
    assert_eq!(cases.len(), 40);
    for (number, case) in cases.iter().enumerate() {
        let learn = write(&dir, "learn.json", &case["learn"].to_string());
        let rows = case["sizes"].as_array().unwrap().iter();
        let rows = rows.map(|row| format!("{},{},{}\n", row[0], row[1], row[2]));
        let sizes =
            write(&dir, "sizes.csv", &format!("layer,expert,bytes\n{}", rows.collect::<String>()));
        let budgets: Vec<String> = case["lane_budgets"]
            .as_array()
            .unwrap()
            .iter()
            .map(Value::to_string)
            .collect();
        let options = [
            ("--budget-bytes", budgets.join(",")),
            ("--weighting", case["weighting"].as_str().unwrap().to_owned()),
            ("--layer-curve", case["layer_curve"].to_string()),
            ("--strategy", case["strategy"].as_str().unwrap().to_owned()),
        ];
        let options = options.map(|(name, value)| args![name, value]);
        let plan = json_of(args!["plan", learn, "--sizes", sizes, options, "-o", "json"]);
        let expected = &case["expected"];
        let scores = expected["ranking"].as_array().unwrap();
        let mut expected_selected = Vec::new();
        for (lane, expected) in expected["lanes"].as_array().unwrap().iter().enumerate() {
            assert_eq!(plan["lanes"][lane]["used_bytes"], expected["used_bytes"], "case {number}");
            assert_eq!(
                plan["lanes"][lane]["budget_bytes"], case["lane_budgets"][lane],
                "case {number}"
            );
            for expert in expected["selected"].as_array().unwrap() {
                let score = scores
                    .iter()
                    .find(|row| row[0] == expert[0] && row[1] == expert[1])
                    .unwrap();
                expected_selected.push(json!([expert[0], expert[1], score[2], lane]));
            }
        }
        let found = plan["selected"].as_array().unwrap().iter();
        let found: Vec<Value> = found
            .map(|entry| json!([entry["layer"], entry["expert"], entry["score"], entry["lane"]]))
            .collect();
        assert_eq!(found, expected_selected, "case {number}");
    }
}

/// Two experts and an empty one in layer 0, one and an empty one in layer 2: five experts, to the byte.
#[test]
fn reads_sizes_from_the_model() {
    let dir = workplace();
    let (learn, model) = (dir.path().join("learn.json"), repository(GPT_OSS));
    let plan = |bytes: u64| {
        let bytes = bytes.to_string();
        json_of(args![
            "plan", learn, "--model", model, "--budget-bytes", bytes, "--weighting", "flat", "-o",
            "json"
        ])
    };
    let five = plan(5 * GPT_OSS_EXPERT);
    assert_eq!(selected(&five), [(0, 3, 0), (2, 1, 0), (0, 5, 0)]);
    assert_eq!(five["lanes"][0]["used_bytes"], 5 * GPT_OSS_EXPERT);
    assert!(
        five["selected"]
            .as_array()
            .unwrap()
            .iter()
            .all(|entry| entry["bytes"] == GPT_OSS_EXPERT)
    );
    assert_eq!(five["estimated_hit_share"], 21.0 / 22.0);
    assert_eq!(selected(&plan(5 * GPT_OSS_EXPERT - 1)), [(0, 3, 0), (2, 1, 0)]);
}

/// For gpt-oss the fork weights by time, with a curve of 1; for other models by rank.
#[test]
fn defaults_equal_those_of_the_fork() {
    let dir = workplace();
    let learn = dir.path().join("learn.json");
    let defaults = |model: &str, more: &[&str]| {
        let model = repository(model);
        let plan = planned(&learn, &model, more);
        (plan["weighting"].clone(), plan["layer_curve"].clone())
    };
    assert_eq!(defaults(QWEN, &[]), (json!("flat"), json!(0.5)));
    assert_eq!(defaults(GPT_OSS, &[]), (json!("time"), json!(1.0)));
    let given = ["--weighting", "capped", "--layer-curve", "0.25"];
    assert_eq!(defaults(GPT_OSS, &given), (json!("smooth"), json!(0.25)));
    // A curve out of range becomes 0.5, with a warning.
    assert_eq!(defaults(GPT_OSS, &["--layer-curve", "-3"]), (json!("time"), json!(0.5)));
    let model = repository(GPT_OSS);
    moe_analyze()
        .args(plan_of(&learn, &model))
        .args(["--layer-curve", "nan"])
        .assert()
        .success()
        .stderr(
            "warning: --layer-curve NaN is out of range (0..=1); 0.5 is used instead, as in the fork\n",
        );
}

/// In both files together, 5 is hotter than 3. With a half-life of one file the older file counts half, and 3 is hotter.
#[test]
fn merges_and_decays_learn_files() {
    let dir = workplace();
    let older = json!({"schema": "llama.cpp.moe_layer_perf.v1", "layers": [{"layer": 0, "experts": [[5, 8]]}]});
    let older = write(&dir, "older.json", &older.to_string());
    let (learn, model) = (dir.path().join("learn.json"), repository(QWEN));
    let first = |more: &[&str]| {
        let plan = planned(&older, &model, args![learn, more]);
        let first = &plan["selected"][0];
        (first["expert"].as_u64().unwrap(), first["hits"].as_u64().unwrap())
    };
    assert_eq!(first(&[]), (5, 12));
    assert_eq!(first(&["--half-life", "1"]), (3, 9));
}

/// A run is counted as `hotness` counts it.
#[test]
fn counts_runs() {
    let dir = TempDir::new().unwrap();
    let (run, learn) = (dir.path().join("run"), dir.path().join("learn.json"));
    support::known_run(&run);
    run!["hotness", run, "--out", learn];
    let model = repository(QWEN);
    let plan = |source| planned(source, &model, args![])["selected"].clone();
    assert_eq!(plan(&run), plan(&learn));
    // Every token of the known run selects expert 3.
    assert_eq!(plan(&run)[0]["expert"], 3);
}

/// Free space is filled with unused experts, the same for the same seed, only if requested.
#[test]
fn fills_free_space_at_random() {
    let dir = workplace();
    let (learn, model) = (dir.path().join("learn.json"), repository(GPT_OSS));
    let plan = |more: &[&str]| planned(&learn, &model, more);
    assert_eq!(selected(&plan(&[])).len(), 4);
    let filled = plan(&["--fill-random"]);
    assert!(selected(&filled).len() > 20);
    assert_eq!(filled, plan(&["--fill-random=7171941"]));
    assert_ne!(selected(&filled), selected(&plan(&["--fill-random=1"])));
    assert!(
        filled["hot_cache"]["command"]
            .as_str()
            .unwrap()
            .starts_with("LLAMA_MOE_HOT_CACHE_FILL_RANDOM=1 ")
    );
}

/// The learn file of a plan keeps unknown keys, contains only the plan's experts, and yields the same plan.
#[test]
fn writes_learn_file_of_the_plan() {
    let dir = workplace();
    let (learn, subset, model) =
        (dir.path().join("learn.json"), dir.path().join("subset.json"), repository(QWEN));
    let budget = (3 * 29_696).to_string();
    let args =
        |learn| ["plan", learn, "--model", arg(&model), "--budget-bytes", &budget, "-o", "json"];
    let plan = json_of(args![args(arg(&learn)), "--out", subset]);
    assert_eq!(selected(&plan), [(0, 3, 0), (0, 5, 0)]);
    let expected = json!({"schema": "llama.cpp.moe_layer_opt_perf.v1", "n_expert": 32, "layers": [
        {"layer": 0, "calls": 7, "experts": [[3, 9], [5, 4]], "note": "kept"}]});
    let written: Value = serde_json::from_str(&fs::read_to_string(&subset).unwrap()).unwrap();
    assert_eq!(written, expected);
    assert_eq!(selected(&json_of(args(arg(&subset)))), selected(&plan));

    let again = args![args(arg(&learn)), "--out", subset];
    assert!(fail![again].contains("--force"));
    run![again, "--force"];
}
