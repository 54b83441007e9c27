//! `simulate`: published curves, an independently computed curve, and every output.

mod curves;
mod inputs;
mod outputs;

use std::collections::BTreeMap;
use std::path::Path;

use crate::support::{arg, run};

/// (cache size, policy) → the other columns by name.
type Rows = BTreeMap<(u64, String), BTreeMap<String, f64>>;

/// The rows of `simulate -o csv` or a published curve, without empty fields.
fn rows(csv: &str) -> Rows {
    let mut lines = csv.lines();
    let columns: Vec<&str> = lines.next().unwrap().split(',').collect();
    assert_eq!(columns[..5], ["budget_mib", "policy", "hit_pct_cum", "hit_pct_decode", "read_mib"]);
    let row = |line: &str| {
        let fields: Vec<&str> = line.split(',').collect();
        let values = columns.iter().zip(&fields).skip(2);
        let values =
            values.filter_map(|(name, value)| Some((name.to_string(), value.parse().ok()?)));
        ((fields[0].parse().unwrap(), fields[1].to_owned()), values.collect())
    };
    lines.map(row).collect()
}

fn simulate(trace: &Path, budgets: &str, policies: &str, more: &[&str]) -> Rows {
    let mut args = vec!["--quiet", "simulate", arg(trace), "--budget-mib", budgets];
    args.extend(["--policy", policies, "-o", "csv"]);
    args.extend(more);
    rows(&run![args])
}
