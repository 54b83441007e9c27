//! Rows and notes.

use std::io::{self, Write};

use moe_analysis::simulate::{Machine, PolicyResult, Workload};
use moe_files::text::counted;
use moe_placement::cache::PolicyName;
use moe_placement::plan::MIB;

use super::inputs::Inputs;
use crate::context::Context;
use crate::output::{Cell, Format, Table, round, rounded};

/// Results for each cache size and policy.
pub struct Results<'a> {
    /// Tokens and bytes of the trace.
    pub workload: Workload,
    /// Results, which include Belady's policy for each cache size.
    pub rows: &'a [PolicyResult],
    /// Policies to print.
    pub policies: &'a [PolicyName],
    /// Machine of the speed bounds.
    pub machine: Option<Machine>,
}

impl Results<'_> {
    /// Prints one row per cache size and policy. The first five columns are those of published curves.
    pub fn print(&self, out: &mut dyn Write, format: Format) -> io::Result<()> {
        let table = Table::of(self.wanted())
            .column("budget_mib", "cache size (MiB)", |row| row.budget / MIB)
            .column("policy", "policy", |row| row.policy.to_string())
            .column("hit_pct_cum", "hit rate (%)", |row| {
                rounded(row.outcome.hit_pct_cum(), 3)
            })
            .column("hit_pct_decode", "hit rate, decode (%)", |row| {
                row.outcome.hit_pct_decode().map(|pct| rounded(pct, 3))
            })
            .column("read_mib", "read (MiB)", |row| {
                rounded(mib(row.outcome.total_read_bytes()), 1)
            })
            .column("moved_bytes", "copied (bytes)", |row| {
                row.outcome.moved_bytes()
            })
            .column("regret_mib", "regret (MiB)", |row| self.regret_mib(row))
            .column("evictions", "evictions", |row| row.outcome.evictions)
            .column("look_ups", "lookups", |row| {
                row.outcome.look_ups.iter().sum::<u64>()
            })
            .column("hits", "hits", |row| row.outcome.hits.iter().sum::<u64>());
        match &self.machine {
            Some(machine) => self.with_speed(machine, table).write(out, format),
            None => table.write(out, format),
        }
    }

    /// Adds bounds of tokens/s; the percentage of memory bandwidth used, if the bandwidth is known; and, if the CPU's times are known,
    /// the speedup over no cache, without any overlap in both cases and with full overlap in both cases.
    fn with_speed<'a, I: Iterator<Item = &'a PolicyResult> + Clone>(
        &'a self,
        machine: &'a Machine,
        table: Table<'a, I>,
    ) -> Table<'a, I> {
        let of = move |row: &PolicyResult| machine.speed(&self.workload, row);
        let without = machine.speed_without_cache(&self.workload);
        let mut table = table
            .column("tokens_s_min", "tokens/s, min", move |row| {
                of(row).map(|speed| rounded(speed.tokens_s_min, 3))
            })
            .column("tokens_s_max", "tokens/s, max", move |row| {
                of(row).map(|speed| rounded(speed.tokens_s_max, 3))
            });
        if machine.memory_bytes_per_s.is_some() {
            table = table
                .column("s_mbu_pct_min", "memory bandwidth, min (%)", move |row| {
                    let (min, _) = of(row)?.s_mbu_pct?;
                    Some(rounded(min, 1))
                })
                .column("s_mbu_pct_max", "memory bandwidth, max (%)", move |row| {
                    let (_, max) = of(row)?.s_mbu_pct?;
                    Some(rounded(max, 1))
                });
        }
        if machine.cpu.is_some() {
            table = table
                .column("speedup_serial", "speedup, serial (×)", move |row| {
                    Some(rounded(of(row)?.tokens_s_min / without?.tokens_s_min, 3))
                })
                .column("speedup_overlap", "speedup, overlapped (×)", move |row| {
                    Some(rounded(of(row)?.tokens_s_max / without?.tokens_s_max, 3))
                });
        }
        table
    }

    /// Returns the MiB copied in excess of Belady's policy.
    fn regret_mib(&self, row: &PolicyResult) -> Option<Cell<'static>> {
        let mut same = self.rows.iter().filter(|other| other.budget == row.budget);
        let best = same.find(|other| other.policy == PolicyName::Belady)?;
        let [copied, least] = [row, best].map(|row| mib(row.outcome.moved_bytes()));
        Some(rounded(copied - least, 1))
    }

    fn wanted(&self) -> impl Iterator<Item = &PolicyResult> + Clone {
        let rows = self.rows.iter();
        rows.filter(|row| self.policies.contains(&row.policy))
    }

    /// Prints the speed without a cache, and the caches that have no hits or do not pay off.
    pub fn print_notes(&self, ctx: &Context) {
        self.note_caches("no hits", ctx, |row| {
            let [_, generated, _] = row.outcome.look_ups;
            generated > 0 && row.outcome.hits[1] == 0
        });
        let machine = self.machine;
        let without = machine.and_then(|machine| machine.speed_without_cache(&self.workload));
        let (Some(machine), Some(without)) = (machine, without) else {
            return;
        };
        let [min, max] = [without.tokens_s_min, without.tokens_s_max].map(|speed| round(speed, 3));
        let speed = if min == max {
            min.to_string()
        } else {
            format!("{min} to {max}")
        };
        ctx.note(format_args!(
            "without a cache, all experts on the CPU: {speed} tokens/s"
        ));
        self.note_caches("not faster than without a cache", ctx, |row| {
            let speed = machine.speed(&self.workload, row);
            speed.is_some_and(|speed| speed.is_no_better_than(&without))
        });
    }

    /// Prints the caches that satisfy `is_meant`.
    fn note_caches(&self, what: &str, ctx: &Context, is_meant: impl Fn(&PolicyResult) -> bool) {
        let rows: Vec<&PolicyResult> = self.wanted().filter(|row| is_meant(row)).collect();
        if rows.len() > 1 && rows.len() == self.wanted().count() {
            ctx.note(format_args!("{what}: all of these caches"));
            return;
        }
        // Rows of a cache size are consecutive.
        for rows in rows.chunk_by(|a, b| a.budget == b.budget) {
            let policies: Vec<String> = rows.iter().map(|row| row.policy.to_string()).collect();
            let mib = rows[0].budget / MIB;
            ctx.note(format_args!("{what} at {mib} MiB: {}", policies.join(", ")));
        }
    }
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / MIB as f64
}

/// Prints the size of the trace, and warnings that are needed to interpret the rows.
pub fn print_notes(inputs: &Inputs, budgets: &[u64], policies: &[PolicyName], ctx: &Context) {
    let batches = &inputs.batches;
    let experts = batches.experts();
    let in_mib = |bytes: u64| format!("{:.1} MiB", mib(bytes));
    let total = experts.total_bytes();
    ctx.note(format_args!(
        "{} of {} in {}; size of all experts: {}",
        counted(batches.n_look_ups(), "lookup"),
        counted(experts.len() as u64, "expert"),
        counted(experts.n_layer() as u64, "layer"),
        in_mib(total)
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
            .any(|&policy| super::evicts_by_recency(policy))
    {
        ctx.note(format_args!(
            "warning: a token reads at most {} of experts, layer by layer; a smaller cache ({} MiB) with eviction by recency evicts most \
             experts before their layer runs again",
            in_mib(cycle),
            list(&short)
        ));
    }
    let large_enough = which(&|budget| budget >= total);
    if !large_enough.is_empty() {
        let whole_model = inputs.model_bytes.map(|bytes| {
            let rest = in_mib(bytes.saturating_sub(total));
            format!("; the other weights of the model need another {rest}")
        });
        ctx.note(format_args!(
            "all experts fit into {} MiB, so no cache is needed{}",
            list(&large_enough),
            whole_model.unwrap_or_default()
        ));
    }
    let large = which(&|budget| budget < batches.largest_batch_bytes());
    if experts.equal_bytes().is_none() {
        ctx.note(
            "belady is a heuristic for this trace, not a bound, because experts differ in size",
        );
    } else if !large.is_empty() {
        ctx.note(format_args!(
            "belady is not a bound at {} MiB, because a batch exceeds the cache size",
            list(&large)
        ));
    }
}
