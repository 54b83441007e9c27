//! Files with columns, keys or values that this version does not know.

use moe_testkit::fixture;

use super::slots::read;
use super::*;

/// The rows and notes of `text`, which the importer `name` must recognize.
fn read_text(name: &str, text: &str) -> (Collected, Vec<String>) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("trace");
    std::fs::write(&path, text).unwrap();
    let (rows, summary) = read(&path);
    assert_eq!(summary.format, name, "{text}");
    (rows, summary.notes)
}

#[test]
fn dropped_rows_have_no_lane() {
    let (rows, summary) = read(&fixture("foreign/bigmoeonedge/dropped.route.csv"));
    assert_eq!(summary.format, "bigmoeonedge");
    assert_eq!(rows.routing.len(), 24);
    assert_eq!(
        summary.model_info.expert_bytes,
        [(LayerId(0), 1000), (LayerId(1), 1200)].into()
    );
    let lanes = |step: u32| -> Vec<Option<u8>> {
        let rows = rows.routing.iter().filter(|row| row.token_id.0 == step);
        rows.map(|row| row.lane).collect()
    };
    let hit = Some(lane::CACHE_HIT);
    assert_eq!(lanes(3), [Some(lane::CACHE_MISS); 4]);
    assert_eq!(lanes(4), [hit; 4]);
    assert_eq!(lanes(5), [hit, None, hit, None]);
    assert!(
        summary.notes[0].starts_with("2 rows with dropped = 1"),
        "{:?}",
        summary.notes
    );
    // `dropped` is a known column.
    assert!(
        !summary
            .notes
            .iter()
            .any(|note| note.contains("unknown column"))
    );
}

#[test]
fn finds_columns_of_route_csv_by_name() {
    let (expected, _) = read_text(
        "bigmoeonedge",
        "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes\n\
         3,1,7,2,1,5,0.5,0,900\n",
    );
    // Further columns, another order, quoted names, and a second header as in concatenated files.
    let (found, notes) = read_text(
        "bigmoeonedge",
        "# route_trace v1\n\
         \"expert\",lat_us,step,layer,slot,turn,phase,weight,residency,expert_bytes,prefetched\n\
         5,12.5,7,2,1,3,1,0.5,0,900,yes\n\
         \"expert\",lat_us,step,layer,slot,turn,phase,weight,residency,expert_bytes,prefetched\n",
    );
    assert_eq!(found, expected);
    assert_eq!(notes[0], "ignored unknown columns: lat_us, prefetched");
    // Only the required columns.
    let (found, _) = read_text("bigmoeonedge", "step,layer,slot,expert\n7,2,1,5\n");
    let row = RoutingRow {
        token_id: TokenId(7),
        slot: 1,
        expert_id: ExpertId(5),
        ..RoutingRow::at_layer(LayerId(2))
    };
    assert_eq!(found.routing, [row]);
}

#[test]
fn skips_and_reports_rows_without_a_position() {
    let (rows, notes) = read_text(
        "bigmoeonedge",
        "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes,dropped\n\
         0,0,-1,1,0,5,0.5,0,900,0\n0,0,-1,1,1,6,nan,0,900,0\n0,0,4,1,0,7,0.5,2,0,0\n",
    );
    let places: Vec<_> = rows
        .routing
        .iter()
        .map(|row| (row.token_id.0, row.expert_id.0, row.lane))
        .collect();
    // Residency 2 is a cache hit on a prefetched expert.
    assert_eq!(places, [(4, 7, Some(lane::CACHE_HIT))]);
    assert!(
        notes[0].starts_with("skipped 2 rows with a negative step"),
        "{notes:?}"
    );
}

#[test]
fn rejects_damaged_route_csv() {
    let options = ImportOptions::default();
    let text = "# route_trace v2\nstep,layer,slot,expert\n";
    let error = error_of("bigmoeonedge", text, &options);
    let is_expected = matches!(
        error,
        ForeignError::Version {
            at: Location::Line(1),
            ..
        }
    );
    assert!(is_expected, "{error}");
    type Expected = fn(&LineError) -> bool;
    let cases: [(&str, u64, Expected); 5] = [
        ("# route_trace v1\nstep,layer,expert\n", 2, |cause| {
            matches!(cause, LineError::NoColumn("slot"))
        }),
        ("step,layer,slot,expert,step\n", 1, |cause| {
            matches!(cause, LineError::RepeatedColumn("step"))
        }),
        ("step,layer,slot,expert\n1,2,3,4,5\n", 2, |cause| {
            matches!(
                cause,
                LineError::Values {
                    values: 5,
                    columns: 4
                }
            )
        }),
        ("step,layer,slot,expert\n1,2,3\n", 2, |cause| {
            matches!(cause, LineError::Missing("expert"))
        }),
        ("step,layer,slot,expert\n1.5,2,3,4\n", 2, |cause| {
            matches!(cause, LineError::Number { name: "step", .. })
        }),
    ];
    for (text, line, is_cause) in cases {
        assert_line_error(&error_of("bigmoeonedge", text, &options), line, is_cause);
    }
}

#[test]
fn ignores_further_values_of_rankings_and_counts() {
    let (rows, notes) = read_text(
        "mesh-llm",
        "# layer=2\nselection_count,expert_id,total_mass,mass_fraction,rank\n40,5,2.5,0.1,1\n",
    );
    let row = rows.counts[0];
    assert_eq!(
        (row.layer_id.0, row.expert_id.0, row.count, row.mass),
        (2, 5, 40, Some(2.5))
    );
    assert_eq!(notes[0], "ignored unknown column: rank");

    let (rows, notes) = read_text("ds4-hotlist", "# ds4 expert hotlist v1\n1 5 40 0.5 9 x\n");
    assert_eq!((rows.counts[0].expert_id.0, rows.counts[0].count), (5, 40));
    assert!(
        notes.iter().any(|note| note.contains("after the fourth")),
        "{notes:?}"
    );

    let (rows, notes) = read_text("coli-usage", "-1 2 8 1\n0 5 40 1700000000\n");
    assert_eq!((rows.counts[0].expert_id.0, rows.counts[0].count), (5, 40));
    assert!(
        notes.iter().any(|note| note.contains("after the third")),
        "{notes:?}"
    );
    // Without a header, a line must have three numbers.
    let error = error_of("coli-usage", "0 5 40 1\n", &ImportOptions::default());
    assert_line_error(&error, 1, |cause| matches!(cause, LineError::TooMany(3)));
}

#[test]
fn finds_columns_of_layer_expert_csv_by_name() {
    let (expected, _) = read_text("layer-expert", "layer,expert\n0,5\n0,1\n1,3\n");
    let (found, notes) = read_text(
        "layer-expert",
        "token,\"expert\",weight,layer\n0,5,0.5,0\n0,1,0.5,0\n0,3,1,1\n",
    );
    assert_eq!(found, expected);
    assert!(
        notes.contains(&"ignored unknown columns: token, weight".to_owned()),
        "{notes:?}"
    );
    type Expected = fn(&LineError) -> bool;
    let cases: [(&str, u64, Expected); 4] = [
        ("layer,experts\n0,1\n", 1, |cause| {
            matches!(cause, LineError::NoColumn("expert"))
        }),
        ("layer,expert,layer\n", 1, |cause| {
            matches!(cause, LineError::RepeatedColumn("layer"))
        }),
        ("layer,expert\n0,1,2\n", 2, |cause| {
            matches!(cause, LineError::Values { values: 3, .. })
        }),
        ("layer,expert,x\n0,1\n", 2, |cause| {
            matches!(cause, LineError::Values { columns: 3, .. })
        }),
    ];
    for (text, line, is_cause) in cases {
        let error = error_of("layer-expert", text, &ImportOptions::default());
        assert_line_error(&error, line, is_cause);
    }
}

#[test]
fn does_not_recognize_tables_of_experts_as_traces() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("sizes.csv");
    for column in ["bytes", "count", "hits", "activations"] {
        std::fs::write(&path, format!("layer,expert,{column}\n0,1,7\n")).unwrap();
        let detected = moe_foreign::detect(&path).unwrap();
        assert!(detected.is_none(), "{column}");
    }
}

/// The number of [`JsonError::NonFinite`].
fn non_finite(error: &ForeignError) -> Option<&str> {
    match error.cause::<JsonError>()? {
        JsonError::NonFinite { value, .. } => Some(value),
        _ => None,
    }
}

/// A key that every importer of JSON must ignore.
const MORE: &str = "\"added\":{\"layer\":7,\"list\":[1,{}]},";

#[test]
fn ignores_unknown_keys_of_json_lines() {
    for name in [
        "jsonl/with-weights.jsonl",
        "lattice/small.jsonl",
        "moe-balance/small.jsonl",
        "megatron/router_trace_rank0.jsonl",
    ] {
        let golden = std::fs::read_to_string(fixture("foreign").join(name)).unwrap();
        let format = name.split('/').next().unwrap();
        let (expected, _) = read_text(format, &golden);
        let more = golden.replace("{\"", &format!("{{{MORE}\""));
        assert!(more.len() > golden.len());
        assert_eq!(read_text(format, &more).0, expected, "{name}");
    }
}

#[test]
fn ignores_unknown_keys_of_json_documents() {
    for name in [
        "expert-tracer/written.json",
        "sglang/logical.json",
        "sglang/physical.json",
        "thesis-json/token-00000.json",
        "vllm/lists.json",
    ] {
        let golden = std::fs::read_to_string(fixture("foreign").join(name)).unwrap();
        let format = name.split('/').next().unwrap();
        let (expected, _) = read_text(format, &golden);
        let more = golden.replacen('{', &format!("{{{MORE}"), 1);
        assert_eq!(read_text(format, &more).0, expected, "{name}");
    }
}

/// A list or a text may be longer than the sample by which a format is recognized.
#[test]
fn recognizes_json_by_keys_after_a_long_value() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("trace");
    let options = ImportOptions {
        top_k: Some(2),
        ..ImportOptions::default()
    };
    let read = |text: &str, name: &str| {
        std::fs::write(&path, text).unwrap();
        let detected = moe_foreign::detect(&path).unwrap();
        let detected = detected.unwrap_or_else(|| panic!("{name} is not recognized"));
        assert_eq!(Some(detected.importer.name()), name.split('/').next());
        let mut rows = Collected::default();
        moe_foreign::import(detected.importer, &detected.source, &options, &mut rows).unwrap();
        rows
    };
    for name in [
        "learn/new.json",
        "learn/old.json",
        "thesis-json/token-00000.json",
        "sglang-response/small.json",
        "vllm/lists.json",
        "sglang/logical.json",
        "sglang/physical.json",
        "expert-tracer/written.json",
        "expert-tracer/planned.json",
        "lattice/small.jsonl",
        "megatron/router_trace_rank0.jsonl",
        "moe-balance/small.jsonl",
        "jsonl/small.jsonl",
    ] {
        let golden = std::fs::read_to_string(fixture("foreign").join(name)).unwrap();
        let expected = read(&golden, name);
        let list = format!("{{\"added\": [0{}],", ", 0".repeat(40_000));
        let text = format!("{{\"added\": \"{}\",", "x\\n\\\"".repeat(20_000));
        for long in [list, text] {
            assert!(long.len() > moe_foreign::SAMPLE_SIZE);
            let later = golden.replacen('{', &long, 1);
            assert_eq!(read(&later, name), expected, "{name}");
        }
    }
}

#[test]
fn reports_numbers_that_are_not_json() {
    let options = ImportOptions::default();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("trace");
    for (line, value) in [
        (
            "{\"t\":0,\"layer\":0,\"experts\":[1],\"weights\":[NaN]}",
            "NaN",
        ),
        (
            "{\"t\":0,\"layer\":0,\"experts\":[1],\"p\":Infinity}",
            "Infinity",
        ),
        (
            "{\"t\":0,\"layer\":0,\"experts\":[1],\"p\":[-Infinity]}",
            "-Infinity",
        ),
    ] {
        std::fs::write(&path, format!("{line}\n")).unwrap();
        let detected = moe_foreign::detect(&path).unwrap();
        assert_eq!(detected.expect(line).importer.name(), "jsonl");
        let error = error_of("jsonl", format!("{line}\n"), &options);
        assert_eq!(error.location(), Some(&Location::Line(1)), "{error}");
        assert_eq!(non_finite(&error), Some(value), "{error}");
    }
    // Also in values that the importer ignores.
    let golden = |name| std::fs::read_to_string(fixture("foreign").join(name)).unwrap();
    let response = golden("sglang-response/small.json");
    let thesis = golden("thesis-json/token-00000.json");
    let learn = golden("learn/new.json");
    for value in ["NaN", "Infinity", "-Infinity"] {
        let ignored = format!("{{\n\"more\": [0.5, {value}],");
        let with = |text: &str| text.replacen('{', &ignored, 1);
        let events = format!(
            ": a comment\ndata: {}\n",
            with(&response).replace('\n', " ")
        );
        for (format, text) in [
            ("sglang-response", with(&response)),
            ("sglang-response", events),
            ("vllm", with(&golden("vllm/lists.json"))),
            ("thesis-json", with(&thesis)),
            ("thesis-json", with(&thesis).replace('\n', " ")),
            ("learn", with(&learn)),
        ] {
            let error = error_of(format, text, &options);
            if format == "learn" {
                assert!(error.to_string().contains(value), "{error}");
            } else {
                assert_eq!(non_finite(&error), Some(value), "{error}");
            }
        }
    }
    let (rows, _) = read_text(
        "jsonl",
        "{\"t\":0,\"layer\":0,\"experts\":[1,2],\"weights\":[null,0.5]}\n",
    );
    let weights: Vec<_> = rows.routing.iter().map(|row| row.weight).collect();
    assert_eq!(weights, [None, Some(0.5)]);
}
