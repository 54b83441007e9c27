//! The LRU hit rate estimated from a sample of the experts.

use std::io::{self, Write};

use moe_analysis::simulate::Estimate;
use moe_placement::plan::MIB;

use crate::option_values::{ValueError, number};
use crate::output::{Format, Table, rounded};

/// Parses a sampling rate: above 0, at most 1.
pub fn rate(text: &str) -> Result<f64, ValueError> {
    number(text, "a number above 0, at most 1", |&rate| {
        rate > 0.0 && rate <= 1.0
    })
}

/// Prints one row per cache size, scaled to the entire trace, with the half-width of the 95 % confidence interval of each hit rate.
pub fn print(out: &mut dyn Write, format: Format, estimates: &[Estimate]) -> io::Result<()> {
    Table::of(estimates)
        .column("budget_mib", "cache size (MiB)", |estimate| {
            estimate.budget / MIB
        })
        .column("policy", "policy", |_| "lru")
        .column("hit_pct_cum", "hit rate (%)", |estimate| {
            rounded(estimate.outcome.hit_pct_cum(), 3)
        })
        .column("hit_pct_cum_error", "hit rate ± (%)", |estimate| {
            rounded(estimate.error_pct_cum, 3)
        })
        .column("hit_pct_decode", "hit rate, decode (%)", |estimate| {
            let decode = estimate.outcome.hit_pct_decode();
            decode.map(|pct| rounded(pct, 3))
        })
        .column(
            "hit_pct_decode_error",
            "hit rate, decode ± (%)",
            |estimate| {
                let decode = estimate.outcome.hit_pct_decode();
                decode.map(|_| rounded(estimate.error_pct_decode, 3))
            },
        )
        .column("read_mib", "read (MiB)", |estimate| {
            rounded(estimate.outcome.total_read_bytes() as f64 / MIB as f64, 1)
        })
        .column("evictions", "evictions", |estimate| {
            estimate.outcome.evictions
        })
        .column("look_ups", "lookups", |estimate| {
            estimate.outcome.look_ups.iter().sum::<u64>()
        })
        .write(out, format)
}
