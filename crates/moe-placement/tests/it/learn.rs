//! Learn files: writing, the JSON schema, and the rules of the fork's parser.

use moe_placement::json::JsonError;
use moe_placement::learn::{
    Error, ExpertObservation, LayerCounts, LearnFile, is_usable, parse_observations,
};
use moe_placement::{ExpertId, LayerId};
use serde_json::{Value, json};

fn example() -> LearnFile {
    LearnFile::from_counts(
        5,
        2,
        3,
        [
            LayerCounts {
                layer: LayerId(4),
                calls: 3,
                experts: vec![0, 7, 0, 2, 1],
            },
            LayerCounts {
                layer: LayerId(2),
                calls: 0,
                experts: vec![0; 5],
            },
            LayerCounts {
                layer: LayerId(0),
                calls: 4,
                experts: vec![5, 0, 1, 0, 0],
            },
        ],
    )
}

#[test]
fn text_equals_that_of_the_fork() {
    let expected = concat!(
        r#"{"enabled":true,"mode":"update","schema":"llama.cpp.moe_layer_opt_perf.v1","n_expert":5,"n_expert_used":2,"#,
        r#""updates":3,"overflow_resets":0,"summary":{"layer_calls":7,"hot_slot_ratio":0.0},"layers":["#,
        r#"{"layer":0,"calls":4,"hot_slots_total":0,"cold_slots_total":6,"hot_slots_per_call":0.0,"cold_slots_per_call":1.5,"#,
        r#""hot_slot_ratio":0.0,"experts":[[0,5],[2,1]],"hot_experts":[],"cold_experts":[[0,5],[2,1]]},"#,
        r#"{"layer":4,"calls":3,"hot_slots_total":0,"cold_slots_total":10,"hot_slots_per_call":0.0,"#,
        r#""cold_slots_per_call":3.3333333333333335,"hot_slot_ratio":0.0,"experts":[[1,7],[3,2],[4,1]],"hot_experts":[],"#,
        r#""cold_experts":[[1,7],[3,2],[4,1]]}]}"#,
    );
    assert_eq!(example().to_json(), expected);
}

#[test]
fn written_file_can_be_parsed() {
    let observations = parse_observations(&example().to_json()).unwrap();
    assert!(is_usable(&observations));
    assert_eq!(
        observations.iter().map(|o| o.layer.0).collect::<Vec<_>>(),
        [0, 4]
    );
    let last = &observations[1];
    assert!(last.has_branch_counts);
    assert_eq!(last.cold_slots_per_call, 10.0 / 3.0);
    assert_eq!(
        last.experts[0],
        ExpertObservation {
            expert: ExpertId(1),
            raw: 0,
            hot: 0,
            cold: 7
        }
    );
}

/// Found by fuzzing: a parser without correct rounding reads these numbers with one wrong bit.
#[test]
fn keeps_large_numbers_exactly() {
    let text = r#"{"schema":"llama.cpp.moe_layer_perf.v1","layers":[{"layer":0,"hot_worklist_calls":3e+66,"experts":[[0,1]]}]}"#;
    let written = LearnFile::parse(text).unwrap().to_json();
    assert!(written.contains("3e+66"), "{written}");
    assert_eq!(LearnFile::parse(&written).unwrap().to_json(), written);
}

fn schema() -> jsonschema::Validator {
    let path = moe_testkit::repository("schemas/learn.schema.json");
    let schema: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    jsonschema::validator_for(&schema).unwrap()
}

#[test]
fn schema_accepts_written_files() {
    let file: Value = serde_json::from_str(&example().to_json()).unwrap();
    schema().validate(&file).unwrap();
}

#[test]
fn schema_rejects_invalid_files() {
    let schema = schema();
    let good: Value = serde_json::from_str(&example().to_json()).unwrap();

    // All keys are required at all levels.
    for pointer in ["", "/summary", "/layers/0"] {
        let keys: Vec<String> = good
            .pointer(pointer)
            .unwrap()
            .as_object()
            .unwrap()
            .keys()
            .cloned()
            .collect();
        for key in keys {
            let mut broken = good.clone();
            broken
                .pointer_mut(pointer)
                .unwrap()
                .as_object_mut()
                .unwrap()
                .remove(&key);
            assert!(!schema.is_valid(&broken), "without {pointer}/{key}");
        }
    }

    let changes = [
        ("/schema", json!("llama.cpp.moe_layer_perf.v1")),
        ("/mode", json!("full")),
        ("/enabled", json!(false)),
        ("/n_expert", json!(0)),
        ("/n_expert", json!("5")),
        ("/updates", json!(-1)),
        ("/summary/hot_slot_ratio", json!(0.5)),
        ("/layers", json!([])),
        ("/layers", json!({})),
        ("/layers/0/layer", json!(-1)),
        ("/layers/0/calls", json!(1.5)),
        ("/layers/0/hot_slots_total", json!(3)),
        ("/layers/0/experts", json!([[1, 0]])),
        ("/layers/0/experts", json!([[1]])),
        ("/layers/0/experts", json!([[1, 2, 3]])),
        ("/layers/0/experts", json!([[1, 2.5]])),
        ("/layers/0/experts", json!({"1": 2})),
        ("/layers/0/hot_experts", json!([[1, 2]])),
    ];
    for (pointer, value) in changes {
        let mut broken = good.clone();
        *broken.pointer_mut(pointer).unwrap() = value.clone();
        assert!(!schema.is_valid(&broken), "{pointer} = {value}");
    }

    let mut unknown = good.clone();
    unknown["layers"][0]["hit_count"] = json!(1);
    assert!(!schema.is_valid(&unknown), "an unknown key");
}

/// The fork's unit test.
#[test]
fn derives_waits_from_branch_counts() {
    let text = json!({"schema": "llama.cpp.moe_layer_perf.v1", "layers": [
        {"layer": 2, "experts": [[4, 9]], "cold_slots_per_call": 4.0,
         "parallel_cold_lane_wall_time_per_call_us": 30.0, "parallel_hot_lane_wall_time_per_call_us": 10.0},
        {"layer": 1, "calls": 4, "cold_slots_total": 12, "parallel_join_wait_time_per_call_us": 18.0,
         "experts": [[9, 99]], "hot_experts": [[3, 2], [1, 10], [1, 4], [2, 0]], "cold_experts": [[3, 5], [2, 6]]},
    ]});
    let observations = parse_observations(&text.to_string()).unwrap();
    let [first, second] = observations.as_slice() else {
        panic!("{observations:?}")
    };

    assert_eq!(first.layer, LayerId(1));
    assert!(first.has_branch_counts);
    let split: Vec<_> = first
        .experts
        .iter()
        .map(|e| (e.expert.0, e.hot, e.cold, e.raw))
        .collect();
    assert_eq!(split, [(1, 14, 0, 0), (2, 0, 6, 0), (3, 2, 5, 0)]);
    assert_eq!(first.cold_slots_per_call, 3.0);
    assert_eq!(first.wait_per_cold_slot_us, 6.0);

    assert!(!second.has_branch_counts);
    assert_eq!(
        second.experts,
        [ExpertObservation {
            expert: ExpertId(4),
            raw: 9,
            hot: 0,
            cold: 0
        }]
    );
    assert_eq!(second.wait_per_cold_slot_us, 5.0);
}

fn with_layers(layers: Value) -> String {
    json!({"schema": "llama.cpp.moe_layer_opt_perf.v1", "layers": layers}).to_string()
}

#[test]
fn saturates_counts_keeps_repeated_layers_and_drops_empty_layers() {
    let text = with_layers(json!([
        {"layer": 0, "experts": [[1, u64::MAX], [1, 5]]},
        {"layer": 0, "experts": [[1, 2]]},
        {"layer": 1, "experts": [[1, 0]], "hot_experts": [], "cold_slots_per_call": "ignored, as the layer is dropped"},
        {"layer": 2},
        {"layer": 3, "experts": [[1, 1], [4294967297u64, 0]], "a key of tomorrow": null},
    ]));
    let observations = parse_observations(&text).unwrap();
    let seen: Vec<_> = observations
        .iter()
        .map(|o| (o.layer.0, o.experts[0].expert.0, o.experts[0].raw))
        .collect();
    assert_eq!(seen, [(0, 1, u64::MAX), (0, 1, 2), (3, 1, 1)]);
}

/// The fork would truncate expert 2^32 + 1 to expert 1.
#[test]
fn rejects_ids_above_32_bits() {
    let wide = u64::from(u32::MAX) + 2;
    let cases = [
        (json!([{"layer": 0, "experts": [[wide, 1]]}]), "experts"),
        (json!([{"layer": wide, "experts": [[1, 1]]}]), "layer"),
    ];
    for (layers, faulty) in cases {
        let error = parse_observations(&with_layers(layers)).unwrap_err();
        assert!(
            matches!(error, Error::WideId { index: 0, key, id } if key == faulty && id == wide),
            "{error}"
        );
    }
}

/// Layer ids have 16 bits.
#[test]
fn rejects_layer_numbers_above_limit() {
    let layers = json!([{"layer": 0, "experts": [[0, 1]]}, {"layer": 65536, "experts": [[1, 1]]}]);
    let error = parse_observations(&with_layers(layers)).unwrap_err();
    assert!(
        matches!(
            error,
            Error::NoLayer {
                index: 1,
                id: 65536
            }
        ),
        "{error}"
    );
}

/// Like the fork's JSON library: a byte order mark is ignored, `calls` may be any number.
#[test]
fn accepts_irregular_files_like_the_fork() {
    let text = concat!(
        "\u{feff}{\"schema\":\"llama.cpp.moe_layer_perf.v1\",\"layers\":[",
        "{\"layer\":0,\"experts\":[[1,2]],\"calls\":2.5,\"cold_slots_total\":6}]}"
    );
    let observations = parse_observations(text).unwrap();
    assert_eq!(observations[0].cold_slots_per_call, 3.0);
}

/// At every level, in files that are only parsed and in filtered files.
#[test]
fn keeps_unknown_keys_and_their_order() {
    let text = concat!(
        r#"{"tomorrow":{"b":1,"a":[null]},"schema":"llama.cpp.moe_layer_opt_perf.v1","layers":["#,
        r#"{"x":1.5,"layer":3,"experts":[[7,2],[9,1]],"y":"z"},{"layer":4,"experts":[[1,1]]}],"more":true}"#
    );
    let file = LearnFile::parse(text).unwrap();
    assert_eq!(file.to_json(), text);
    let filtered = file.filter(|layer, expert| (layer, expert) == (LayerId(3), ExpertId(9)));
    assert_eq!(
        filtered.to_json(),
        concat!(
            r#"{"tomorrow":{"b":1,"a":[null]},"schema":"llama.cpp.moe_layer_opt_perf.v1","layers":["#,
            r#"{"x":1.5,"layer":3,"experts":[[9,1]],"y":"z"}],"more":true}"#
        )
    );
}

/// Only live reports have slot totals.
#[test]
fn reads_slots_of_live_report() {
    let report = |enabled: Value| {
        let report = json!({"enabled": enabled, "schema": "llama.cpp.moe_layer_perf.v1", "layers": [
            {"layer": 1, "hot_slots_total": 3, "cold_slots_total": 5}, {"layer": 2}]});
        LearnFile::parse(&report.to_string()).unwrap().layer_slots()
    };
    let slots: Vec<_> = report(json!(true))
        .unwrap()
        .iter()
        .map(|slots| (slots.layer.0, slots.hot, slots.cold))
        .collect();
    assert_eq!(slots, [(1, 3, 5), (2, 0, 0)]);
    assert!(report(json!(false)).is_none());
    assert!(report(json!(null)).is_none());
}

#[test]
fn distinguishes_usable_and_unusable_files() {
    let text = r#"{"schema":"llama.cpp.moe_layer_opt_perf.v1","layers":[{"layer":0,"experts":[[12,100],[42,90]]}]}"#;
    assert!(is_usable(&parse_observations(text).unwrap()));
    let off =
        r#"{"enabled":false,"mode":"off","schema":"llama.cpp.moe_layer_opt_perf.v1","layers":[]}"#;
    assert!(!is_usable(&parse_observations(off).unwrap()));
}

#[test]
fn reads_totals() {
    let layers = json!([{"layer": 3, "calls": 5}, {"layer": 0}, {"layer": 3, "calls": null}]);
    let with = |key: &str, value: Value, layers: &Value| {
        let mut root = json!({"schema": "llama.cpp.moe_layer_opt_perf.v1", "layers": layers});
        root[key] = value;
        LearnFile::parse(&root.to_string()).unwrap().totals()
    };
    let totals = with("n_expert", json!(8), &layers).unwrap();
    assert_eq!((totals.n_expert, totals.n_expert_used), (Some(8), None));
    let expected = [(3, Some(5)), (0, None), (3, None)].map(|(id, calls)| (LayerId(id), calls));
    assert_eq!(totals.calls, expected);
    for (key, value) in [
        ("n_expert", json!(-1)),
        ("n_expert", json!("8")),
        ("n_expert_used", json!(null)),
        ("n_expert_used", json!(1u64 << 32)),
    ] {
        let error = with(key, value, &layers).unwrap_err();
        let expected = format!("`{key}` of the learn file must be an integer from 0 to 4294967295");
        assert_eq!(error.to_string(), expected);
    }
    let layers = json!([{"layer": 0}, {"layer": 1, "calls": 1.5}]);
    let error = with("n_expert", json!(8), &layers).unwrap_err();
    assert!(
        matches!(&error, Error::Unsigned { key, .. } if key == "layers[1].calls"),
        "{error}"
    );
}

/// Whether an error is the expected one.
type IsExpected = fn(&Error) -> bool;

#[test]
fn rejects_invalid_files() {
    let cases: [(String, IsExpected); 17] = [
        ("{".into(), |e| matches!(e, Error::Json(_))),
        ("{\"layers\":[NaN]}".into(), |e| {
            matches!(
                e,
                Error::Json(JsonError::NotFinite {
                    value: "NaN",
                    line: 1,
                    column: 12
                })
            )
        }),
        (
            "{\"schema\":\"llama.cpp.moe_layer_perf.v1\",\"layers\":[],\"layers\":[]}".into(),
            |e| matches!(e, Error::RepeatedKey(JsonError::RepeatedKey { key, .. }) if key == "layers"),
        ),
        (
            "{\"layers\":[{\"layer\":0,\"layer\":1}]}".into(),
            |e| matches!(e, Error::RepeatedKey(JsonError::RepeatedKey { key, .. }) if key == "layer"),
        ),
        ("[]".into(), |e| matches!(e, Error::Schema { .. })),
        ("{\"layers\":[]}".into(), |e| {
            matches!(e, Error::Schema { .. })
        }),
        ("{\"schema\":7,\"layers\":[]}".into(), |e| {
            matches!(e, Error::Schema { .. })
        }),
        (
            "{\"schema\":\"llama.cpp.moe_layer_opt_perf.v1\"}".into(),
            |e| matches!(e, Error::Layers),
        ),
        (with_layers(json!({})), |e| matches!(e, Error::Layers)),
        (with_layers(json!([{"layer": 1}, 5])), |e| {
            matches!(e, Error::LayerId { index: 1 })
        }),
        (with_layers(json!([{"layer": -1}])), |e| {
            matches!(e, Error::LayerId { index: 0 })
        }),
        (with_layers(json!([{"layer": 1.0}])), |e| {
            matches!(e, Error::LayerId { index: 0 })
        }),
        (
            with_layers(json!([{"layer": 0, "hot_experts": null}])),
            |e| {
                matches!(
                    e,
                    Error::Experts {
                        index: 0,
                        key: "hot_experts"
                    }
                )
            },
        ),
        (
            with_layers(json!([{"layer": 0, "experts": [[1, 2, 3]]}])),
            |e| {
                matches!(
                    e,
                    Error::Experts {
                        index: 0,
                        key: "experts"
                    }
                )
            },
        ),
        (
            with_layers(json!([{"layer": 0, "cold_experts": [[1, -2]]}])),
            |e| {
                matches!(
                    e,
                    Error::Experts {
                        index: 0,
                        key: "cold_experts"
                    }
                )
            },
        ),
        (
            with_layers(json!([{"layer": 0, "experts": [[1, 2.0]]}])),
            |e| {
                matches!(
                    e,
                    Error::Experts {
                        index: 0,
                        key: "experts"
                    }
                )
            },
        ),
        (
            with_layers(
                json!([{"layer": 0, "experts": [[1, 2]], "total_moe_time_per_call_us": "3"}]),
            ),
            |e| {
                matches!(
                    e,
                    Error::Number {
                        index: 0,
                        key: "total_moe_time_per_call_us"
                    }
                )
            },
        ),
    ];
    for (text, is_expected) in cases {
        let error = parse_observations(&text).expect_err(&text);
        assert!(is_expected(&error), "{text}: {error}");
        assert!(!error.to_string().contains('\n'));
    }
}

/// A layer whose hot and cold experts are all removed is dropped. Its `experts` were not read before, and must not be read
/// after.
#[test]
fn filter_does_not_activate_unread_counts() {
    let text = r#"{"schema": "llama.cpp.moe_layer_opt_perf.v1", "layers": [
        {"layer": 3, "calls": 1, "experts": [[1, 50]], "hot_experts": [[0, 3]], "cold_experts": []},
        {"layer": 4, "calls": 1, "experts": [[1, 7]], "hot_experts": [], "cold_experts": []}
    ]}"#;
    let filtered = LearnFile::parse(text)
        .unwrap()
        .filter(|_, expert| expert == ExpertId(1));
    let layers = filtered.observations().unwrap();
    let left: Vec<(u16, u64)> = layers
        .iter()
        .map(|l| (l.layer.0, l.experts[0].raw))
        .collect();
    assert_eq!(left, [(4, 7)]);
}
