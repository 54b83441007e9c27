//! Importers of counts.

use super::*;

fn assert_counts(name: &str) -> Summary {
    let (rows, summary) = import(name, &ImportOptions::default());
    assert!(!summary.is_ordered(), "{name}");
    for (layer, expected) in (0u16..).zip(COUNTS) {
        let mut counts: Vec<(u32, u64)> = rows
            .counts
            .iter()
            .filter(|row| row.layer_id.0 == layer)
            .map(|row| (row.expert_id.0, row.count))
            .collect();
        counts.sort_unstable();
        assert_eq!(counts, expected, "{name}, layer {layer}");
    }
    summary
}

#[test]
fn reads_coli_usage_with_and_without_headers() {
    let summary = assert_counts("coli-usage/small.coli_usage");
    assert_eq!(summary.model_info.n_expert, Some(8));
    assert_eq!(summary.model_info.n_layer, Some(2));
    // With two layers, layer 2 is the MTP head.
    assert_eq!(
        summary.notes[0],
        "skipped 1 count of layers of the MTP head"
    );
    let summary = assert_counts("coli-usage/old.coli_usage");
    assert_eq!(summary.model_info, ModelInfo::default());

    let options = ImportOptions::default();
    let error = error_of("coli-usage", "-1 2 8\n0 8 1\n", &options);
    let is_expected = matches!(
        error,
        ForeignError::OutOfRange {
            at: Location::Line(2),
            name: "expert",
            id: 8,
            limit: 8,
            ..
        }
    );
    assert!(is_expected, "{error}");
    let error = error_of("coli-usage", "-2 2 77\n0 1 1\n", &options);
    let is_expected = matches!(
        error,
        ForeignError::Version {
            at: Location::Line(1),
            ..
        }
    );
    assert!(is_expected, "{error}");
}

#[test]
fn reads_ds4_hotlist() {
    let summary = assert_counts("ds4-hotlist/small.hotlist");
    assert_eq!(summary.model_info.model.as_deref(), Some("small"));
    assert_eq!(
        (summary.model_info.n_layer, summary.model_info.n_expert),
        (Some(2), Some(8))
    );
}

#[test]
fn reads_a_directory_of_mesh_llm_rankings() {
    let (rows, summary) = import("mesh-llm", &ImportOptions::default());
    assert_eq!((summary.rows, summary.counts), (0, 9));
    // Expert 5 of layer 0 is twice in slot 0 and twice in slot 1; expert 6 of layer 1 is three times in slot 0 and twice in slot 1.
    let five = rows.counts.iter().find(|row| row.layer_id.0 == 0);
    assert_eq!(
        five.map(|row| (row.expert_id.0, row.count, row.mass)),
        Some((5, 4, Some(2.0)))
    );
    let six = rows.counts.iter().find(|row| row.layer_id.0 == 1);
    assert_eq!(
        six.map(|row| (row.expert_id.0, row.count, row.mass)),
        Some((6, 5, Some(2.625)))
    );
}

#[test]
fn reads_both_formats_of_the_expert_tracer() {
    assert_counts("expert-tracer/written.json");
    let summary = assert_counts("expert-tracer/planned.json");
    assert!(summary.notes[0].contains("three times"));
    let options = ImportOptions::default();
    let without_layers = "{\"total_tokens\":1,\"expert_activations\":{\"9\":2}}";
    let error = error_of("expert-tracer", without_layers, &options);
    assert!(matches!(error, ForeignError::File { .. }), "{error}");
}

#[test]
fn rejects_learn_files_with_invalid_numbers() {
    for (numbers, expected) in [
        (r#""n_expert": "8""#, "`n_expert` of the learn file"),
        (
            r#""n_expert_used": -1"#,
            "`n_expert_used` of the learn file",
        ),
    ] {
        let schema = moe_placement::learn::SCHEMA;
        let text = format!(
            r#"{{"schema": "{schema}", {numbers}, "layers": [{{"layer": 0, "experts": [[1, 2]]}}]}}"#
        );
        let error = error_of("learn", text, &ImportOptions::default());
        let document = Location::Element("/".into());
        assert_eq!(error.location(), Some(&document), "{error}");
        assert!(error.to_string().contains(expected), "{error}");
    }
}
