//! Importers of routing.

use super::*;

#[test]
fn reads_route_csv_with_lanes_and_model_info() {
    let (rows, summary) = import("bigmoeonedge/small.route.csv", &ImportOptions::default());
    let mut expected = expected_rows(|layer, token| RoutingRow {
        sequence_id: Some(0),
        phase: phase(token),
        ..weighted(layer, token)
    });
    // The first use of an expert is a miss; later uses in the same prompt pass have no known lane.
    let (miss, hit) = (Some(lane::CACHE_MISS), Some(lane::CACHE_HIT));
    let lanes = [
        miss, miss, miss, None, None, miss, miss, miss, None, None, miss, None, // prompt
        hit, hit, hit, miss, miss, hit, hit, hit, // two tokens
    ];
    for (row, lane) in expected.iter_mut().zip(lanes) {
        row.lane = lane;
    }
    assert_eq!(rows.routing, expected);
    assert_eq!(
        summary.model_info,
        ModelInfo {
            model: Some("/models/small.gguf".into()),
            arch: Some("qwen3moe".into()),
            n_layer: Some(2),
            n_expert: Some(8),
            n_expert_used: Some(2),
            expert_bytes: [(LayerId(0), 1000), (LayerId(1), 1200)].into(),
            ..ModelInfo::default()
        }
    );

    let header = "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes\n";
    let error_of_row = |row: &str| {
        let text = format!("{header}{row}\n");
        error_of("bigmoeonedge", text, &ImportOptions::default())
    };
    let error = error_of_row("0,0,0,0,0,83,0.5,0");
    assert_line_error(&error, 2, |cause| {
        matches!(cause, LineError::Missing("expert_bytes"))
    });
    let error = error_of_row("0,0,0,0,0,4096,0.5,0,1");
    let is_expected = matches!(
        error,
        ForeignError::OutOfRange {
            at: Location::Line(2),
            name: "expert",
            id: 4096,
            ..
        }
    );
    assert!(is_expected, "{error}");
    let error = error_of_row("0,2,0,0,0,1,0.5,0,1");
    assert_line_error(&error, 2, |cause| matches!(cause, LineError::Format(_)));
}

/// Traces that BigMoeOnEdge published. The expected numbers are those of `awk`.
#[test]
fn reads_published_bigmoeonedge_traces() {
    let Some(data) = moe_testkit::data("bigmoeonedge") else {
        return;
    };
    for (file, n_rows, n_prompt, n_hits, n_expert_used, bytes) in [
        ("gptoss.route.csv", 10_560, 5_952, 2_066, 2, 13_219_200),
        ("qwen.route.csv", 44_766, 7_902, 29_597, 6, 3_059_712),
    ] {
        let path = data.join(file);
        let detected = moe_foreign::detect(&path).unwrap().unwrap();
        assert_eq!(detected.importer.name(), "bigmoeonedge");
        let mut rows = Collected::default();
        let options = ImportOptions::default();
        let summary =
            moe_foreign::import(detected.importer, &detected.source, &options, &mut rows).unwrap();
        assert_eq!(summary.rows, n_rows);
        assert_eq!(rows.routing.len() as u64, n_rows);
        let of = |f: fn(&&RoutingRow) -> bool| rows.routing.iter().filter(f).count();
        assert_eq!(of(|row| row.phase == Some(Phase::Prompt)), n_prompt);
        assert_eq!(of(|row| row.lane == Some(lane::CACHE_HIT)), n_hits);
        assert_eq!(summary.model_info.n_expert, Some(128));
        assert_eq!(summary.model_info.n_expert_used, Some(n_expert_used));
        assert_eq!(summary.model_info.expert_bytes[&LayerId(0)], bytes);
        assert_eq!(
            summary.model_info.expert_bytes.len() as u32,
            summary.model_info.n_layer.unwrap()
        );
    }
}

#[test]
fn reads_jsonl_with_and_without_weights() {
    let expected = expected_rows(|layer, token| RoutingRow {
        phase: phase(token),
        ..plain(layer, token)
    });
    assert_eq!(routing("jsonl/small.jsonl"), expected);
    let expected = expected_rows(|layer, token| RoutingRow {
        sequence_id: Some(4),
        ..weighted(layer, token)
    });
    assert_eq!(routing("jsonl/with-weights.jsonl"), expected);

    let options = ImportOptions::default();
    let text = "{\"t\":0,\"layer\":0,\"experts\":[1]}\n\n{\"t\":1,\"layer\":\n";
    let error = error_of("jsonl", text, &options);
    assert_eq!(error.location(), Some(&Location::Line(3)), "{error}");
    let is_expected = |cause: &JsonError| matches!(cause, JsonError::Invalid { column: 15, .. });
    assert!(
        error.cause::<JsonError>().is_some_and(is_expected),
        "{error}"
    );
    let text = "{\"t\":0,\"layer\":0,\"experts\":[1,2],\"weights\":[0.5]}\n";
    let error = error_of("jsonl", text, &options);
    assert_line_error(&error, 1, |cause| {
        matches!(
            cause,
            LineError::Weights {
                weights: 1,
                experts: 2
            }
        )
    });
}

#[test]
fn keeps_empty_slots_and_treats_unknown_phases_as_unset() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("trace");
    std::fs::write(
        &path,
        "{\"t\":7,\"layer\":1,\"experts\":[3,-1,2],\"phase\":\"warm\"}\n",
    )
    .unwrap();
    let mut rows = Collected::default();
    let options = ImportOptions::default();
    let source = Source::file(&path);
    let summary = moe_foreign::import(importer("jsonl"), &source, &options, &mut rows).unwrap();
    let slots: Vec<(u16, u32)> = rows
        .routing
        .iter()
        .map(|row| (row.slot, row.expert_id.0))
        .collect();
    assert_eq!(slots, [(0, 3), (2, 2)]);
    assert_eq!(rows.routing[0].phase, None);
    assert_eq!(
        summary.notes,
        ["phase \"warm\" is not known and is treated as unset"]
    );
}

#[test]
fn reads_lattice_jsonl() {
    assert_eq!(routing("lattice/small.jsonl"), expected_rows(weighted));
}

#[test]
fn reads_moe_balance_jsonl() {
    // A line contains all tokens of a layer.
    let mut expected = expected_rows(|layer, token| RoutingRow {
        sequence_id: Some(12),
        ..weighted(layer, token)
    });
    expected.sort_by_key(|row| (row.layer_id.0, row.token_id.0));
    assert_eq!(routing("moe-balance/small.jsonl"), expected);
}

#[test]
fn reads_a_file_or_a_directory_of_megatron() {
    let expected = expected_rows(|layer, token| RoutingRow {
        sequence_id: Some(0),
        ..plain(layer, token)
    });
    let (rows, summary) = import(
        "megatron/router_trace_rank0.jsonl",
        &ImportOptions::default(),
    );
    assert_eq!(rows.routing, expected);
    assert_eq!(
        summary.notes[0],
        "skipped 1 line of blocks other than the decoder"
    );
    // The directory of all ranks is one trace.
    let (rows, _) = import("megatron", &ImportOptions::default());
    assert_eq!(rows.routing, expected);
}

#[test]
fn reads_colibri_route_trace() {
    assert_eq!(routing("colibri-trace/small.txt"), expected_rows(weighted));
    let options = ImportOptions::default();
    let error = error_of("colibri-trace", "0 0 0 5:0.75\n0 1 0 3\n", &options);
    assert_line_error(&error, 2, |cause| matches!(cause, LineError::Format(_)));
}

#[test]
fn reads_layer_expert_csv_as_counts_or_as_routing() {
    let summary = assert_layer_expert_counts();
    assert_eq!(summary.missing, [Missing::TopK].into());
    let two = ImportOptions {
        top_k: Some(2),
        ..ImportOptions::default()
    };
    let (rows, _) = import("layer-expert/small.csv", &two);
    assert_eq!(rows.routing, expected_rows(plain));
    // The top-k may also be that of the model.
    let model = ImportOptions {
        model: Some(ModelInfo {
            n_expert_used: Some(2),
            ..ModelInfo::default()
        }),
        ..ImportOptions::default()
    };
    let (rows, _) = import("layer-expert/small.csv", &model);
    assert_eq!(rows.routing, expected_rows(plain));

    let four = ImportOptions {
        top_k: Some(4),
        ..ImportOptions::default()
    };
    let error = error_of("layer-expert", "layer,expert\n0,1\n0,2\n1,3\n", &four);
    assert_eq!(error.location(), Some(&Location::Line(2)), "{error}");
    let end = "not a multiple of the top-k 4; specify the top-k of the model that was traced";
    assert!(error.to_string().ends_with(end), "{error}");
}

/// Asserts the counts of the golden file without a top-k.
fn assert_layer_expert_counts() -> Summary {
    let path = fixture("layer-expert/small.csv");
    let mut counts = Counts::default();
    let options = ImportOptions::default();
    let source = Source::file(&path);
    let summary =
        moe_foreign::import(importer("layer-expert"), &source, &options, &mut counts).unwrap();
    for (layer, expected) in COUNTS.iter().enumerate() {
        let layer = &counts.layers()[&LayerId(layer as u16)];
        let found: Vec<(u32, u64)> = layer.experts.iter().map(|(e, t)| (e.0, t.count)).collect();
        assert_eq!(found, *expected);
        assert_eq!(layer.total(), 10);
    }
    summary
}
