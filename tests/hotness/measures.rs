//! Measures of the known run, whose routing is simple enough to compute by hand, and of published traces.

use std::path::Path;

use serde_json::Value;

use super::{Fixture, close, number};
use crate::support::{N_GENERATED, N_LAYER, arg, fail, repository, run};

/// The rows of a table as JSON.
fn rows(path: &Path, more: &[&str]) -> Vec<Value> {
    let args = ["--quiet", "hotness", arg(path), "-o", "json"];
    serde_json::from_str(&run![args, more]).unwrap()
}

/// In 16 tokens of a layer expert 3 has 16 activations and six others have 8: shares ¼ and six times ⅛, of 32 experts.
#[test]
fn measures_equal_hand_computed_values() {
    let fixture = Fixture::new();
    let rows = rows(&fixture.path("run"), &["--table", "measures"]);
    assert_eq!(rows.len() as u32, N_LAYER + 1, "the last is of the model");
    for row in &rows[..5] {
        assert_eq!(
            (&row["rows"], &row["activations"], &row["active"]),
            (&16.into(), &64.into(), &7.into())
        );
        close(row, "active_fraction", 7.0 / 32.0);
        // 1, 2, 4, 8 and 16 experts.
        for (column, share) in
            [("top_1", 0.25), ("top_5", 0.375), ("top_10", 0.625), ("top_25", 1.0), ("top_50", 1.0)]
        {
            close(row, column, share);
        }
        // ¼ · 2 + 6 · ⅛ · 3 = 2.75 bits of 5.
        close(row, "entropy", 0.55);
        close(row, "effective", 2f64.powf(2.75));
        close(row, "max_over_mean", 8.0);
        // Σ (2i − 33) x: 8 for ranks 26 to 31, 16 for rank 32; over 32 · 64.
        close(row, "gini", (8.0 * 144.0 + 16.0 * 31.0) / 2048.0);
        // Of four experts the next token has only expert 3 in common, which is always first.
        close(row, "overlap", 0.25);
        close(row, "repeat_first", 1.0);
        close(row, "repeat_first_two", 1.0);
    }
    assert_eq!(rows[5]["rows"], 1 + N_GENERATED);
    let model = &rows[6];
    assert_eq!(model["layer_id"], Value::Null);
    assert_eq!(model["activations"], 5 * 64 + 28);
    // Expert 3 of six layers, six others of each: 42 of 192 slots.
    close(model, "active_fraction", 42.0 / 192.0);
    close(model, "overlap", 0.25);
}

#[test]
fn overall_table_has_one_row_per_measure() {
    let fixture = Fixture::new();
    let rows = rows(&fixture.path("run"), &["--table", "overall"]);
    let names: Vec<&str> = rows
        .iter()
        .map(|row| row["measure"].as_str().unwrap())
        .collect();
    assert_eq!(names.len(), 14);
    let row = |name: &str| &rows[names.iter().position(|n| *n == name).unwrap()];
    close(row("overlap"), "layer_mean", 0.25);
    close(row("max_over_mean"), "least", 8.0);
    // Layer 5 routes 7 tokens: 3 of one alternating pair and 4 of the other.
    assert_eq!(row("entropy")["least_layer"], 5);
}

/// Two consecutive tokens both select expert 3, and three other experts each: seven distinct experts.
#[test]
fn counts_distinct_experts_of_batches() {
    let fixture = Fixture::new();
    let rows = rows(&fixture.path("run"), &["--table", "batches"]);
    let layer_0: Vec<&Value> = rows.iter().filter(|row| row["layer_id"] == 0).collect();
    let batches: Vec<u64> = layer_0
        .iter()
        .map(|row| row["batch"].as_u64().unwrap())
        .collect();
    assert_eq!(batches, [1, 2, 4, 8, 16]);
    for (row, distinct) in layer_0.iter().zip([4.0, 7.0, 7.0, 7.0, 7.0]) {
        close(row, "distinct", distinct);
    }
    // Expert 3 with probability 1, each of the six others with ½: 1 + 6 · ¾. Uniform router: 32 (1 − (28/32)²).
    close(layer_0[1], "if_independent", 5.5);
    close(layer_0[1], "if_uniform", 7.5);
    let all = rows.last().unwrap();
    assert_eq!((&all["layer_id"], &all["batch"]), (&Value::Null, &16.into()));
}

/// Without order there are spread measures, but no overlap of consecutive tokens and no batches.
#[test]
fn counts_without_order_have_only_load_balance_measures() {
    let counts = repository("fixtures/foreign/imatrix/small.gguf");
    let summary = run!["--quiet", "hotness", counts];
    assert!(summary.starts_with("unknown_order: "), "{summary}");
    let rows = rows(&counts, &["--table", "measures"]);
    assert!(rows[0]["gini"].is_f64() && rows[0]["overlap"].is_null());
    for asked in [["--table", "batches"], ["--by=sequence", "-ocsv"]] {
        let line = fail!["--quiet", "hotness", counts, asked];
        assert!(line.contains("order"), "{line}");
    }
}

/// Figures that were computed earlier from the same decode traces (with top-k overridden to 6 and 2).
#[test]
fn reproduces_published_skew() {
    let traces = [
        ("qwen", [3059.0, 0.778, 0.579, 0.874, 0.380]),
        ("gptoss", [f64::NAN, 0.861, 0.735, 0.970, 0.179]),
    ];
    let Some(data) = moe_testkit::data("bigmoeonedge") else {
        return;
    };
    for (name, [active, gini, top_10, top_25, overlap]) in traces {
        let trace = data.join(format!("{name}.route.csv"));
        let rows = rows(&trace, &["--phase", "generate", "--table", "measures"]);
        let model = rows.last().unwrap();
        if active.is_finite() {
            assert_eq!(number(model, "active"), active);
        }
        for (column, expected) in
            [("gini", gini), ("top_10", top_10), ("top_25", top_25), ("overlap", overlap)]
        {
            let found = number(model, column);
            assert!(
                (found - expected).abs() <= 0.000_6,
                "{name} {column}: {found}, not {expected}"
            );
        }
    }
}
