//! Formats of counts.

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
fn coli_usage() {
    let summary = assert_counts("coli-usage/small.coli_usage");
    assert_eq!(summary.facts.n_expert, Some(8));
    assert_eq!(summary.facts.n_layer, Some(2));
    // Layer 2 of two layers is the predictor's.
    assert!(summary.notes[0].starts_with("left out: 1 count of the multi-token predictor"));
    let summary = assert_counts("coli-usage/old.coli_usage");
    assert_eq!(summary.facts, Facts::default());

    let options = ImportOptions::default();
    assert_eq!(
        refused("coli-usage", "-1 2 8\n0 8 1\n", &options),
        "trace: line 2: expert 8 is out of range (below 8); the file is damaged, or belongs to another model"
    );
    assert_eq!(
        refused("coli-usage", "-2 2 77\n0 1 1\n", &options),
        "trace: line 1: format version 2 is not supported (1 is); read it with a newer moe-analyze"
    );
}

#[test]
fn ds4_hotlist() {
    let summary = assert_counts("ds4-hotlist/small.hotlist");
    assert_eq!(summary.facts.model.as_deref(), Some("small"));
    assert_eq!(
        (summary.facts.n_layer, summary.facts.n_expert),
        (Some(2), Some(8))
    );
}

#[test]
fn mesh_llm() {
    // A file a layer; the directory is one trace.
    let (rows, summary) = import("mesh-llm", &ImportOptions::default());
    assert_eq!((summary.rows, summary.counts), (0, 9));
    // Expert 5 of layer 0 is first twice and second twice, expert 6 of layer 1 as well and once more first.
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
fn expert_tracer() {
    assert_counts("expert-tracer/written.json");
    let summary = assert_counts("expert-tracer/planned.json");
    assert!(summary.notes[0].contains("three times"));
    let options = ImportOptions::default();
    assert_eq!(
        refused(
            "expert-tracer",
            "{\"total_tokens\":1,\"expert_activations\":{\"9\":2}}",
            &options
        ),
        "trace: counts of experts without their layers; trace with per-layer counts switched on"
    );
}
