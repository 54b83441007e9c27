//! `/moe-layer-perf` and `/moe-hot-cache`.

use std::fs;
use std::sync::Arc;

use serde_json::{Value, json};

use crate::client::{get, hello, post, rejected, service};
use crate::fake::Fake;

const SCHEMA: &str = "llama.cpp.moe_layer_opt_perf.v1";

/// Asserts that a report conforms to `schemas/perf.schema.json`.
#[track_caller]
fn check_report(report: &Value) {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../schemas/perf.schema.json"
    );
    let schema = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    let validator = jsonschema::validator_for(&schema).unwrap();
    let errors: Vec<_> = validator
        .iter_errors(report)
        .map(|error| error.to_string())
        .collect();
    assert!(errors.is_empty(), "{errors:?} in {report}");
}

#[test]
fn reports_counters() {
    let report = get(&service(&hello()), "/moe-layer-perf").json();
    check_report(&report);
    assert_eq!(report["layers"][0]["experts"], json!([[3, 1], [5, 1]]));
}

#[test]
fn sets_the_mode_and_resets_the_counters() {
    for (mode, name) in [
        (json!("full"), "full"),
        (json!("update"), "update"),
        (json!("off"), "off"),
        (json!("on"), "full"),
        (json!("1"), "full"),
        (json!(1), "full"),
        (json!(1.0), "full"),
        (json!(true), "full"),
        (json!(false), "off"),
        (json!(0), "off"),
    ] {
        let router = service(&hello());
        let report = post(&router, "/moe-layer-perf", &json!({"mode": mode})).json();
        check_report(&report);
        assert_eq!(
            (&report["mode"], &report["layers"]),
            (&json!(name), &json!([])),
            "{mode}"
        );
        assert_eq!(get(&router, "/moe-layer-perf").json(), report);
    }
    let router = service(&hello());
    for (body, param) in [
        (json!({}), Value::Null),
        (json!({"mode": "some"}), json!("mode")),
        (json!({"mode": null}), json!("mode")),
        (json!({"mode": 2}), json!("mode")),
    ] {
        assert_eq!(
            rejected(&router, "/moe-layer-perf", &body).1,
            param,
            "{body}"
        );
    }
}

#[test]
fn updates_the_hot_cache() {
    let backend = hello();
    let router = service(&backend);
    let mut learn =
        json!({"schema": SCHEMA, "layers": [{"layer": 1, "experts": [[12, 100]]}], "other": [1]});
    let answer = post(&router, "/moe-hot-cache", &learn).json();
    let mut expected = json!({
        "success": true, "active": true, "update_rate": 1.0, "exchanged": 1, "candidates": 1,
        "max_exchange": 1, "hot_experts": 2, "layers_changed": 1, "saved_to_disk": false,
    });
    assert_eq!(answer, expected);

    let sent = learn.clone();
    learn["save_to_disk"] = true.into();
    expected["saved_to_disk"] = true.into();
    expected["path"] = "learn.json".into();
    expected["backup_path"] = "learn.1.json".into();
    assert_eq!(post(&router, "/moe-hot-cache", &learn).json(), expected);
    let state = backend.state();
    assert_eq!(state.updates[1].0.to_json(), sent.to_string());
    assert_eq!((state.updates[0].1, state.updates[1].1), (false, true));
}

/// JSON Schema has no other integers, but a learn file spells them without a fraction.
#[test]
fn accepts_integers_with_a_fraction_of_zero() {
    let backend = hello();
    let layer = r#"{"layer": 1.0, "experts": [[12, 1e2]], "cold_slots_per_call": 1.0}"#;
    let body = format!("{{\"schema\": \"{SCHEMA}\", \"layers\": [{layer}]}}");
    let body = serde_json::from_str(&body).unwrap();
    let answer = post(&service(&backend), "/moe-hot-cache", &body);
    assert_eq!(answer.status, 200, "{}", answer.text);
    let layer = r#"{"layer":1,"experts":[[12,100]],"cold_slots_per_call":1.0}"#;
    let expected = format!("{{\"schema\":\"{SCHEMA}\",\"layers\":[{layer}]}}");
    assert_eq!(backend.state().updates[0].0.to_json(), expected);
}

#[test]
fn updates_the_hot_cache_from_a_query() {
    let backend = hello();
    let router = service(&backend);
    let learn = json!({"schema": SCHEMA, "layers": []}).to_string();
    let encoded: String = learn.bytes().map(|byte| format!("%{byte:02x}")).collect();
    assert_eq!(
        get(&router, &format!("/moe-hot-cache?json={encoded}")).status,
        200
    );
    // Without a learn file, the current counters are used.
    assert_eq!(get(&router, "/moe-hot-cache").status, 200);
    let updates = backend.state().updates.clone();
    assert_eq!(updates[0].0.to_json(), learn);
    assert_eq!(updates[1].0.to_json(), get(&router, "/moe-layer-perf").text);
    assert_eq!(get(&router, "/moe-hot-cache?json=%7b").error().1, "json");
    assert_eq!(get(&router, "/moe-hot-cache?json=a&json=b").status, 400);
}

#[test]
fn rejects_wrong_learn_files() {
    let backend = hello();
    let router = service(&backend);
    for body in [
        json!([]),
        json!({}),
        json!({"schema": "other", "layers": []}),
        json!({"schema": SCHEMA}),
        json!({"schema": SCHEMA, "layers": [{}]}),
        json!({"schema": SCHEMA, "layers": [{"layer": -1}]}),
        json!({"schema": SCHEMA, "layers": [{"layer": 0, "experts": [[1]]}]}),
        json!({"schema": SCHEMA, "layers": [], "save_to_disk": "yes"}),
        json!({"schema": SCHEMA, "layers": [{"layer": 0, "calls": "1"}]}),
        json!({"schema": SCHEMA, "layers": [{"layer": 0, "cold_slots_per_call": {}}]}),
        json!({"schema": SCHEMA, "layers": [{"layer": 65536}]}),
        json!({"schema": SCHEMA, "layers": [{"layer": 0, "experts": [[1_u64 << 32, 0]]}]}),
    ] {
        rejected(&router, "/moe-hot-cache", &body);
    }
    assert!(backend.state().updates.is_empty());
}

#[test]
fn reports_a_missing_hot_cache() {
    let mut backend = Fake::new(&[], 1);
    backend.has_hot_cache = false;
    let learn = json!({"schema": SCHEMA, "layers": []});
    let answer = post(&service(&Arc::new(backend)), "/moe-hot-cache", &learn);
    assert_eq!(
        (answer.status, answer.error().0),
        (409, "there is no hot cache".into())
    );
}
