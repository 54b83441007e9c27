//! Curves that other programs computed.

use std::fs;
use std::path::Path;

use moe_testkit::data;

use super::{Rows, rows, simulate};
use crate::support::{arg, repository, run};

/// All rows of a curve except those of `random`, which has another seed, equal those of the trace.
fn reproduces(trace: &Path, curve: &str) {
    let published: Rows = rows(curve)
        .into_iter()
        .filter(|((_, policy), _)| policy != "random")
        .collect();
    let names = |index: fn(&(u64, String)) -> String| {
        let mut names: Vec<String> = published.keys().map(index).collect();
        names.sort();
        names.dedup();
        names.join(",")
    };
    let budgets = names(|(budget, _)| budget.to_string());
    let policies = names(|(_, policy)| policy.clone());
    let simulated = simulate(trace, &budgets, &policies, &[]);
    assert_eq!(published.len(), simulated.len());
    for (row, expected) in &published {
        for (column, expected) in expected {
            assert_eq!(simulated[row][column], *expected, "{row:?} {column}");
        }
    }
}

/// Both models of BigMoeOnEdge at all eleven cache sizes: `belady`, `lru`, `lfu`, `layer`, `layerlfu`.
#[test]
fn reproduces_published_curves() {
    let Some(data) = data("bigmoeonedge") else {
        return;
    };
    for (model, n_rows) in [("qwen", 55), ("gptoss", 55)] {
        let curve = fs::read_to_string(data.join(format!("{model}-curve.csv"))).unwrap();
        let deterministic = rows(&curve)
            .into_keys()
            .filter(|(_, policy)| policy != "random");
        assert_eq!(deterministic.count(), n_rows);
        reproduces(&data.join(format!("{model}.route.csv")), &curve);
    }
}

/// Fraction of the previous token's experts that are selected again: 38.0 % and 17.9 %, as published with the traces.
#[test]
fn reproduces_published_precision_of_the_previous_token() {
    let Some(data) = data("bigmoeonedge") else {
        return;
    };
    for (model, published) in [("qwen", "38.0"), ("gptoss", "17.9")] {
        let trace = data.join(format!("{model}.route.csv"));
        let args = ["--quiet", "simulate", arg(&trace), "--budget-mib", "1000", "--policy", "lru"];
        let more =
            ["--predictor", "previous", "--pcie-gb-s", "1", "--window-us", "1", "-o", "json"];
        let rows: serde_json::Value = serde_json::from_str(&run![args, more]).unwrap();
        let precision = rows[1]["precision_pct"].as_f64().unwrap();
        assert_eq!(format!("{precision:.1}"), published);
    }
}

/// A trace with experts of two sizes, two requests, and all policies that plain Python can compute
/// (`fixtures/simulate/make.py`).
#[test]
fn reproduces_curve_of_another_implementation() {
    let curve = repository("fixtures/simulate/mixed-curve.csv");
    let curve = fs::read_to_string(curve).unwrap();
    assert_eq!(rows(&curve).len(), 8 * 13);
    reproduces(&repository("fixtures/simulate/mixed.route.csv"), &curve);
}
