//! Merging and decay of learn files.

use moe_placement::learn::{Error, LearnFile};
use serde_json::{Value, json};

fn parse(file: Value) -> LearnFile {
    LearnFile::parse(&file.to_string()).unwrap()
}

fn merge_with_decay(files: &[LearnFile], half_life: f64) -> Result<Option<LearnFile>, Error> {
    LearnFile::merge_with_decay(files.iter().cloned().map(Ok), half_life)
}

fn value(file: &LearnFile) -> Value {
    serde_json::from_str(&file.to_json()).unwrap()
}

/// Two runs of 10 and 30 calls: 10 × 4 µs and 30 × 8 µs are 280 µs in 40 calls.
#[test]
fn adds_counters_and_weights_averages_by_calls() {
    let mut one = parse(json!({
        "enabled": true, "mode": "full", "schema": "llama.cpp.moe_layer_opt_perf.v1", "n_expert": 8, "updates": 10,
        "summary": {"layer_calls": 10, "hot_slot_ratio": 0.25, "total_moe_time_per_call_us": 4.0},
        "layers": [{"layer": 5, "calls": 10, "hot_slots_total": 10, "cold_slots_total": 30, "cold_slots_per_call": 3.0,
            "hot_slot_ratio": 0.25, "total_moe_time_per_call_us": 4.0, "parallel_fallbacks": 2,
            "parallel_fallback_reasons": {"threshold": 2}, "note": "first",
            "experts": [[1, 30], [2, 10]], "hot_experts": [[2, 10]], "cold_experts": [[1, 30]]}],
    }));
    let other = parse(json!({
        "enabled": true, "mode": "full", "schema": "llama.cpp.moe_layer_opt_perf.v1", "n_expert": 8, "updates": 30,
        "summary": {"layer_calls": 30, "hot_slot_ratio": 0.5, "total_moe_time_per_call_us": 8.0},
        "layers": [
            {"layer": 5, "calls": 30, "hot_slots_total": 60, "cold_slots_total": 60, "cold_slots_per_call": 2.0,
            "hot_slot_ratio": 0.5, "total_moe_time_per_call_us": 8.0, "parallel_fallbacks": 1,
            "parallel_fallback_reasons": {"other": 1}, "note": "second",
            "experts": [[2, 60], [3, 60]], "hot_experts": [[2, 60]], "cold_experts": [[3, 60]]},
            {"layer": 0, "calls": 1, "experts": [[7, 1], [7, 2]]}],
    }));
    one.merge(&other).unwrap();
    let expected = json!({
        "enabled": true, "mode": "full", "schema": "llama.cpp.moe_layer_opt_perf.v1", "n_expert": 8, "updates": 40,
        "summary": {"layer_calls": 40, "hot_slot_ratio": 0.4375, "total_moe_time_per_call_us": 7.0},
        "layers": [
            {"layer": 0, "calls": 1, "experts": [[7, 3]], "hot_experts": [], "cold_experts": [[7, 3]]},
            {"layer": 5, "calls": 40, "hot_slots_total": 70, "cold_slots_total": 90, "cold_slots_per_call": 2.25,
            "hot_slot_ratio": 0.4375, "total_moe_time_per_call_us": 7.0, "parallel_fallbacks": 3,
            "parallel_fallback_reasons": {"threshold": 2, "other": 1}, "note": "first",
            "experts": [[1, 30], [2, 70], [3, 60]], "hot_experts": [[2, 70]], "cold_experts": [[1, 30], [3, 60]]}],
    });
    assert_eq!(value(&one), expected);
}

/// Readers ignore unsplit counts if split counts exist, so merging must convert unsplit counts to cold counts.
#[test]
fn keeps_raw_counts_when_merged_with_split_counts() {
    let layer =
        |layer: Value| parse(json!({"schema": "llama.cpp.moe_layer_perf.v1", "layers": [layer]}));
    let mut file = layer(json!({"layer": 0, "experts": [[4, 5]]}));
    file.merge(&layer(
        json!({"layer": 0, "hot_experts": [[4, 2]], "cold_experts": [[6, 1]]}),
    ))
    .unwrap();
    let observed = &file.observations().unwrap()[0];
    let counts: Vec<_> = observed
        .experts
        .iter()
        .map(|e| (e.expert.0, e.hot, e.cold))
        .collect();
    assert_eq!(counts, [(4, 2, 5), (6, 0, 1)]);
    assert_eq!(
        value(&file)["layers"][0]["experts"],
        json!([[4, 7], [6, 1]])
    );
}

#[test]
fn rejects_files_of_different_models() {
    let file = |n: u32| {
        parse(json!({"schema": "llama.cpp.moe_layer_perf.v1", "n_expert": n, "layers": []}))
    };
    let error = file(8).merge(&file(16)).unwrap_err();
    assert!(
        matches!(
            error,
            Error::Model {
                key: "n_expert",
                ..
            }
        ),
        "{error}"
    );
}

/// With a half-life of two files, four files have the weights 0.354, 0.5, 0.707 and 1.
#[test]
fn decays_older_files() {
    let files: Vec<LearnFile> = (0..4)
        .map(|expert| {
            parse(json!({"schema": "llama.cpp.moe_layer_perf.v1", "updates": 8, "layers": [
                {"layer": 0, "calls": 100, "cold_slots_per_call": 2.0, "experts": [[expert, 1000], [9, 1]]}]}))
        })
        .collect();
    let merged = merge_with_decay(&files, 2.0).unwrap().unwrap();
    let merged = value(&merged);
    // The count 1 of expert 9 is rounded: 0.354 to 0, 0.5 and 0.707 to 1.
    assert_eq!(
        merged["layers"][0]["cold_experts"],
        json!([[0, 354], [1, 500], [2, 707], [3, 1000], [9, 3]])
    );
    assert_eq!(merged["layers"][0]["calls"], 35 + 50 + 71 + 100);
    assert_eq!(merged["layers"][0]["cold_slots_per_call"], 2.0);
    assert_eq!(merged["updates"], 3 + 4 + 6 + 8);
    assert!(merge_with_decay(&[], 1.0).unwrap().is_none());
    let alone = merge_with_decay(&files[..1], 1.0).unwrap().unwrap();
    assert_eq!(alone, files[0], "a single file does not change");
}
