//! LRU's curve from a sample of the experts.

use std::io::{self, Write};

use moe_analysis::simulate::Estimate;
use moe_placement::plan::MIB;

use super::report::rounded;
use crate::option_values::{ValueError, number};
use crate::output::{Cell, Format, write_rows};

/// As of the whole trace, with half of a 95 % interval beside each hit rate.
const COLUMNS: [&str; 9] = [
    "budget_mib",
    "policy",
    "hit_pct_cum",
    "hit_pct_cum_error",
    "hit_pct_decode",
    "hit_pct_decode_error",
    "read_mib",
    "evictions",
    "look_ups",
];

/// A share of the experts: above 0, at most 1.
pub fn rate(text: &str) -> Result<f64, ValueError> {
    number(text, "a number above 0, at most 1", |&rate| {
        rate > 0.0 && rate <= 1.0
    })
}

/// Prints a row for each budget.
pub fn print(out: &mut dyn Write, format: Format, estimates: &[Estimate]) -> io::Result<()> {
    let rows = estimates.iter().map(|estimate| -> Vec<Cell> {
        let outcome = &estimate.outcome;
        let decode = outcome.hit_pct_decode();
        let decode_error = decode.map(|_| estimate.error_pct_decode);
        vec![
            (estimate.budget / MIB).into(),
            "lru".into(),
            rounded(outcome.hit_pct_cum(), 3).into(),
            rounded(estimate.error_pct_cum, 3).into(),
            decode.map(|pct| rounded(pct, 3)).into(),
            decode_error.map(|pct| rounded(pct, 3)).into(),
            rounded(outcome.total_read_bytes() as f64 / MIB as f64, 1).into(),
            outcome.evictions.into(),
            outcome.look_ups.iter().sum::<u64>().into(),
        ]
    });
    write_rows(out, format, &COLUMNS, rows)
}
