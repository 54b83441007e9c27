//! Rows and remarks.

use std::io::{self, Write};

use moe_analysis::simulate::{Machine, Needs, Row};
use moe_gguf::text::counted;
use moe_placement::cache::PolicyName;
use moe_placement::plan::MIB;

use super::inputs::Inputs;
use crate::context::Context;
use crate::output::{Format, Table};

/// Results for each budget and policy.
pub struct Results<'a> {
    /// What the trace's tokens need.
    pub needs: Needs,
    /// Results; Belady's for each budget are there, asked for or not.
    pub rows: &'a [Row],
    /// What was asked for.
    pub policies: &'a [PolicyName],
    /// Whose speed is told.
    pub machine: Option<Machine>,
}

impl Results<'_> {
    /// Prints a row for each budget and policy that was asked for. The first five columns are those of published curves.
    pub fn print(&self, out: &mut dyn Write, format: Format) -> io::Result<()> {
        let table = Table::of(self.wanted())
            .column("budget_mib", "budget (MiB)", |row| row.budget / MIB)
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
            .column("look_ups", "look-ups", |row| {
                row.outcome.look_ups.iter().sum::<u64>()
            })
            .column("hits", "hits", |row| row.outcome.hits.iter().sum::<u64>());
        match &self.machine {
            Some(machine) => self.with_speed(machine, table).write(out, format),
            None => table.write(out, format),
        }
    }

    /// Adds the bounds of the speed, the share of the memory's bandwidth if that is known, and, if the CPU's times are known, how
    /// many times the speed without a cache it is: with nothing overlapped in either, and with all overlapped in both.
    fn with_speed<'a, I: Iterator<Item = &'a Row> + Clone>(
        &'a self,
        machine: &'a Machine,
        table: Table<'a, I>,
    ) -> Table<'a, I> {
        let of = move |row: &Row| machine.speed(&self.needs, row);
        let without = machine.speed_without(&self.needs);
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

    /// MiB copied beyond Belady's policy.
    fn regret_mib(&self, row: &Row) -> Option<f64> {
        let mut same = self.rows.iter().filter(|other| other.budget == row.budget);
        let best = same.find(|other| other.policy == PolicyName::Belady)?;
        let [copied, least] = [row, best].map(|row| mib(row.outcome.moved_bytes()));
        Some(rounded(copied - least, 1))
    }

    fn wanted(&self) -> impl Iterator<Item = &Row> + Clone {
        let rows = self.rows.iter();
        rows.filter(|row| self.policies.contains(&row.policy))
    }

    /// Tells the speed without a cache, and which caches are not worth having.
    pub fn remark(&self, ctx: &Context) {
        self.remark_rows("no hits", ctx, |row| {
            let [_, generated, _] = row.outcome.look_ups;
            generated > 0 && row.outcome.hits[1] == 0
        });
        let machine = self.machine;
        let without = machine.and_then(|machine| machine.speed_without(&self.needs));
        let (Some(machine), Some(without)) = (machine, without) else {
            return;
        };
        ctx.remark(format_args!(
            "without a cache, all experts on the CPU: {} to {} tokens/s",
            rounded(without.tokens_s_min, 3),
            rounded(without.tokens_s_max, 3)
        ));
        self.remark_rows("not worth having", ctx, |row| {
            let speed = machine.speed(&self.needs, row);
            speed.is_some_and(|speed| speed.is_no_better_than(&without))
        });
    }

    /// Tells the caches of which something holds.
    fn remark_rows(&self, what: &str, ctx: &Context, is_meant: impl Fn(&Row) -> bool) {
        let rows: Vec<&Row> = self.wanted().filter(|row| is_meant(row)).collect();
        if rows.len() > 1 && rows.len() == self.wanted().count() {
            ctx.remark(format_args!("{what}: any of these caches"));
            return;
        }
        // Rows of a budget come together.
        for rows in rows.chunk_by(|a, b| a.budget == b.budget) {
            let policies: Vec<String> = rows.iter().map(|row| row.policy.to_string()).collect();
            let mib = rows[0].budget / MIB;
            ctx.remark(format_args!("{what} at {mib} MiB: {}", policies.join(", ")));
        }
    }
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / MIB as f64
}

/// The number with so many digits behind the point.
pub fn rounded(value: f64, digits: usize) -> f64 {
    // As printing rounds, not as multiplication would.
    format!("{value:.digits$}").parse().unwrap_or(value)
}

/// Tells what was read, and what the figures do not say of themselves.
pub fn remark(inputs: &Inputs, budgets: &[u64], policies: &[PolicyName], ctx: &Context) {
    let batches = &inputs.batches;
    let experts = batches.experts();
    let in_mib = |bytes: u64| format!("{:.1} MiB", mib(bytes));
    let total = experts.total_bytes();
    ctx.remark(format_args!(
        "{} of {} in {}; all experts take {}",
        counted(batches.n_look_ups(), "look-up"),
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
            .any(|&policy| super::goes_by_last_use(policy))
    {
        ctx.remark(format_args!(
            "warning: a token goes through {} of experts, layer by layer; a cache of less ({} MiB) that goes by the last use \
             has forgotten an expert before its layer comes again",
            in_mib(cycle),
            list(&short)
        ));
    }
    let whole = which(&|budget| budget >= total);
    if !whole.is_empty() {
        let whole_model = inputs.model_bytes.map(|bytes| {
            let rest = in_mib(bytes.saturating_sub(total));
            format!("; with {rest} of other weights the whole model fits")
        });
        ctx.remark(format_args!(
            "all experts fit in {} MiB: no cache is needed there{}",
            list(&whole),
            whole_model.unwrap_or_default()
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
