//! Curves that others computed.

use std::fs;
use std::path::Path;

use crate::support::repository;
use crate::{Rows, rows, simulate};

/// Every row of a curve but those of `random`, which has a seed of its own, is what the trace gives.
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

/// Both models of BigMoeOnEdge at all eleven budgets: `belady`, `lru`, `lfu`, `layer`, `layerlfu`.
#[test]
fn published_curves_are_reproduced_to_the_last_digit() {
    let data = repository("../shared/data/bigmoeonedge");
    for (model, n_rows) in [("qwen", 55), ("gptoss", 55)] {
        let Ok(curve) = fs::read_to_string(data.join(format!("{model}-curve.csv"))) else {
            eprintln!(
                "skipped: no published curve of {model} in {}",
                data.display()
            );
            continue;
        };
        let deterministic = rows(&curve)
            .into_keys()
            .filter(|(_, policy)| policy != "random");
        assert_eq!(deterministic.count(), n_rows);
        reproduces(&data.join(format!("{model}.route.csv")), &curve);
    }
}

/// A trace with experts of two sizes, two requests and every policy that can be computed by hand: what a few pages of plain
/// Python make of it (`fixtures/simulate/make.py`).
#[test]
fn a_curve_of_another_implementation_is_reproduced() {
    let curve = repository("fixtures/simulate/mixed-curve.csv");
    let curve = fs::read_to_string(curve).unwrap();
    assert_eq!(rows(&curve).len(), 8 * 13);
    reproduces(&repository("fixtures/simulate/mixed.route.csv"), &curve);
}
