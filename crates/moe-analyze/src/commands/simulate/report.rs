//! Rows and remarks.

use std::io::{self, Write};

use moe_analysis::simulate::{Batches, Row};
use moe_placement::cache::PolicyName;
use moe_placement::plan::MIB;

use crate::cli::Context;
use crate::output::{Cell, Format, count, write_rows};

/// The columns; the first five are those of published curves.
const COLUMNS: [&str; 10] = [
    "budget_mib",
    "policy",
    "hit_pct_cum",
    "hit_pct_decode",
    "read_mib",
    "moved_bytes",
    "regret_mib",
    "evictions",
    "look_ups",
    "hits",
];

/// Prints a row for each budget and policy that was asked for. `rows` has Belady's for each budget, too.
pub fn print(
    out: &mut dyn Write,
    format: Format,
    rows: &[Row],
    policies: &[PolicyName],
) -> io::Result<()> {
    let best = |budget| {
        let mut same = rows.iter().filter(|row| row.budget == budget);
        same.find(|row| row.policy == PolicyName::Belady)
    };
    let wanted = rows.iter().filter(|row| policies.contains(&row.policy));
    let cells = wanted.map(|row| -> Vec<Cell> {
        let outcome = &row.outcome;
        let mib = |bytes: u64| bytes as f64 / MIB as f64;
        let moved_mib = mib(outcome.moved_bytes());
        let regret_mib =
            best(row.budget).map(|best| rounded(moved_mib - mib(best.outcome.moved_bytes()), 1));
        vec![
            (row.budget / MIB).into(),
            row.policy.to_string().into(),
            rounded(outcome.hit_pct_cum(), 3).into(),
            outcome.hit_pct_decode().map(|pct| rounded(pct, 3)).into(),
            rounded(mib(outcome.read_bytes), 1).into(),
            outcome.moved_bytes().into(),
            regret_mib.into(),
            outcome.evictions.into(),
            outcome.look_ups.iter().sum::<u64>().into(),
            outcome.hits.iter().sum::<u64>().into(),
        ]
    });
    let cells: Vec<Vec<Cell>> = cells.collect();
    write_rows(out, format, &COLUMNS, cells)
}

/// The number with so many digits behind the point.
fn rounded(value: f64, digits: usize) -> f64 {
    // As printing rounds, not as multiplication would.
    format!("{value:.digits$}").parse().unwrap_or(value)
}

/// Tells what was read, and what the figures do not say of themselves.
pub fn remark(batches: &Batches, budgets: &[u64], policies: &[PolicyName], ctx: &Context) {
    let experts = batches.experts();
    let mib = |bytes: u64| format!("{:.1} MiB", bytes as f64 / MIB as f64);
    let total = experts.total_bytes();
    ctx.remark(format_args!(
        "{} of {} in {}; all experts take {}",
        count(batches.n_look_ups(), "look-up"),
        count(experts.len() as u64, "expert"),
        count(experts.n_layer() as u64, "layer"),
        mib(total)
    ));
    let list = |budgets: &[u64]| {
        let mib = budgets.iter().map(|budget| (budget / MIB).to_string());
        mib.collect::<Vec<_>>().join(", ")
    };
    let which = |is_meant: &dyn Fn(u64) -> bool| -> Vec<u64> {
        budgets.iter().copied().filter(|&b| is_meant(b)).collect()
    };
    let cycle = batches.cycle_bytes();
    let short = which(&|budget| budget < cycle);
    if !short.is_empty()
        && policies
            .iter()
            .any(|&policy| super::goes_by_last_use(policy))
    {
        ctx.remark(format_args!(
            "warning: a token goes through {} of experts, layer by layer; a cache of less ({} MiB) that goes by the last use \
             has forgotten an expert before its layer comes again",
            mib(cycle),
            list(&short)
        ));
    }
    let whole = which(&|budget| budget >= total);
    if !whole.is_empty() {
        ctx.remark(format_args!(
            "all experts fit in {} MiB: no cache is needed there",
            list(&whole)
        ));
    }
    let large = which(&|budget| budget < batches.largest_batch_bytes());
    if experts.equal_bytes().is_none() {
        ctx.remark("belady is a guess here, no bound: experts differ in size");
    } else if !large.is_empty() {
        ctx.remark(format_args!(
            "belady is no bound at {} MiB, where a batch exceeds the cache; it is the optimum where none does",
            list(&large)
        ));
    }
}
