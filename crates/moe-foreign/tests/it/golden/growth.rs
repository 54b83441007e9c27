//! Formats that gain columns, keys or values after a version of this program.

use moe_testkit::fixture;

use super::slots::read;
use super::*;

/// What the importer `name` makes of `text`, with its notes.
fn read_text(name: &str, text: &str) -> (Collected, Vec<String>) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("trace");
    std::fs::write(&path, text).unwrap();
    let (rows, summary) = read(&path);
    assert_eq!(summary.format, name, "{text}");
    (rows, summary.notes)
}

#[test]
fn dropped_rows_are_routed_but_neither_hit_nor_miss() {
    let (rows, summary) = read(&fixture("foreign/bigmoeonedge/dropped.route.csv"));
    assert_eq!(summary.format, "bigmoeonedge");
    assert_eq!(rows.routing.len(), 24);
    assert_eq!(
        summary.facts.expert_bytes,
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
        summary.notes[0].starts_with("2 rows of the routing with dropped = 1"),
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
fn route_csv_is_read_by_column_names() {
    let (expected, _) = read_text(
        "bigmoeonedge",
        "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes\n\
         3,1,7,2,1,5,0.5,0,900\n",
    );
    // Other columns, another order, quoted names, and a second header where files were joined.
    let (found, notes) = read_text(
        "bigmoeonedge",
        "# route_trace v1\n\
         \"expert\",lat_us,step,layer,slot,turn,phase,weight,residency,expert_bytes,prefetched\n\
         5,12.5,7,2,1,3,1,0.5,0,900,yes\n\
         \"expert\",lat_us,step,layer,slot,turn,phase,weight,residency,expert_bytes,prefetched\n",
    );
    assert_eq!(found, expected);
    assert_eq!(notes[0], "ignored unknown columns: lat_us, prefetched");
    // Only what a row cannot be without is required.
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
fn rows_without_a_position_are_left_out_and_counted() {
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
    // Residency 2 is a hit on a prefetched expert.
    assert_eq!(places, [(4, 7, Some(lane::CACHE_HIT))]);
    assert!(
        notes[0].starts_with("left out: 2 rows with a negative step"),
        "{notes:?}"
    );
}

#[test]
fn damaged_tables_are_refused() {
    let options = ImportOptions::default();
    for (text, expected) in [
        (
            "# route_trace v2\nstep,layer,slot,expert\n",
            "line 1: version \"2\" of the route trace is not supported (1 is)",
        ),
        (
            "# route_trace v1\nstep,layer,expert\n",
            "line 2: the header has no column slot",
        ),
        (
            "step,layer,slot,expert,step\n",
            "line 1: the header names column step twice",
        ),
        (
            "step,layer,slot,expert\n1,2,3,4,5\n",
            "line 2: 5 values, but the header names 4",
        ),
        ("step,layer,slot,expert\n1,2,3\n", "line 2: no expert"),
        (
            "step,layer,slot,expert\n1.5,2,3,4\n",
            "line 2: step \"1.5\" is not a number in the range",
        ),
    ] {
        let error = refused("bigmoeonedge", text, &options);
        assert!(error.starts_with(&format!("trace: {expected}")), "{error}");
    }
}

#[test]
fn rankings_and_counts_with_more_values_are_read() {
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
    // Without a header, four numbers in a line are anything.
    let error = refused("coli-usage", "0 5 40 1\n", &ImportOptions::default());
    assert!(error.contains("more than 3 values"), "{error}");
}

#[test]
fn choices_are_read_by_column_names() {
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
    for (text, expected) in [
        (
            "layer,experts\n0,1\n",
            "line 1: the header has no column expert",
        ),
        (
            "layer,expert,layer\n",
            "line 1: the header names column layer twice",
        ),
        (
            "layer,expert\n0,1,2\n",
            "line 2: 3 values, but the header names 2",
        ),
        (
            "layer,expert,x\n0,1\n",
            "line 2: 2 values, but the header names 3",
        ),
    ] {
        let error = refused("layer-expert", text, &ImportOptions::default());
        assert!(error.starts_with(&format!("trace: {expected}")), "{error}");
    }
}

#[test]
fn tables_of_experts_are_not_taken_for_choices() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("sizes.csv");
    for column in ["bytes", "count", "hits", "activations"] {
        std::fs::write(&path, format!("layer,expert,{column}\n0,1,7\n")).unwrap();
        let detected = moe_foreign::detect(&path).unwrap();
        assert!(detected.is_none(), "{column}");
    }
}

/// An object that each importer of JSON lines ignores.
const MORE: &str = "\"added\":{\"layer\":7,\"list\":[1,{}]},";

#[test]
fn json_lines_with_more_keys_are_read_as_before() {
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
fn json_documents_with_more_keys_are_read_as_before() {
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

#[test]
fn values_that_are_not_json_are_named() {
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
        let error = refused("jsonl", format!("{line}\n"), &options);
        assert!(
            error.starts_with(&format!("trace: line 1: {value} is not JSON (column ")),
            "{error}"
        );
    }
    // Where an importer ignores them, too: log-probabilities of a response, the duration of a file.
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
            let error = refused(format, text, &options);
            assert!(error.contains(&format!("{value} is not JSON (")), "{error}");
        }
    }
    let (rows, _) = read_text(
        "jsonl",
        "{\"t\":0,\"layer\":0,\"experts\":[1,2],\"weights\":[null,0.5]}\n",
    );
    let weights: Vec<_> = rows.routing.iter().map(|row| row.weight).collect();
    assert_eq!(weights, [None, Some(0.5)]);
}
