//! Rows and remarks.

use std::io::{self, Write};

use moe_analysis::simulate::{Machine, Needs, Row, Speed};
use moe_gguf::text::counted;
use moe_placement::cache::PolicyName;
use moe_placement::plan::MIB;

use super::inputs::Inputs;
use crate::context::Context;
use crate::output::{Cell, Format, write_rows};

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

/// Columns where the machine is told, and where its memory is.
const SPEED_COLUMNS: [&str; 2] = ["tokens_s_min", "tokens_s_max"];
const S_MBU_COLUMNS: [&str; 2] = ["s_mbu_pct_min", "s_mbu_pct_max"];

/// Where it is told what the CPU takes: times the speed without a cache, if nothing overlaps in either and if all does.
const SPEEDUP_COLUMNS: [&str; 2] = ["speedup_serial", "speedup_overlap"];

/// A row for each budget and policy that was asked for.
pub struct Table<'a> {
    /// What the trace's tokens need.
    pub needs: Needs,
    /// Results; Belady's for each budget are there, asked for or not.
    pub rows: &'a [Row],
    /// What was asked for.
    pub policies: &'a [PolicyName],
    /// Whose speed is told.
    pub machine: Option<Machine>,
}

impl Table<'_> {
    /// Prints it.
    pub fn print(&self, out: &mut dyn Write, format: Format) -> io::Result<()> {
        let mut columns = COLUMNS.to_vec();
        if let Some(machine) = &self.machine {
            columns.extend(SPEED_COLUMNS);
            if machine.memory_bytes_per_s.is_some() {
                columns.extend(S_MBU_COLUMNS);
            }
            if machine.cpu.is_some() {
                columns.extend(SPEEDUP_COLUMNS);
            }
        }
        let cells: Vec<Vec<Cell>> = self.wanted().map(|row| self.cells(row)).collect();
        write_rows(out, format, &columns, cells)
    }

    fn wanted(&self) -> impl Iterator<Item = &Row> {
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

    fn cells(&self, row: &Row) -> Vec<Cell<'static>> {
        let outcome = &row.outcome;
        let mib = |bytes: u64| bytes as f64 / MIB as f64;
        let mut same = self.rows.iter().filter(|other| other.budget == row.budget);
        let best = same.find(|other| other.policy == PolicyName::Belady);
        let regret_mib = best.map(|best| {
            let moved_mib = mib(outcome.moved_bytes());
            rounded(moved_mib - mib(best.outcome.moved_bytes()), 1)
        });
        let mut cells: Vec<Cell> = vec![
            (row.budget / MIB).into(),
            row.policy.to_string().into(),
            rounded(outcome.hit_pct_cum(), 3).into(),
            outcome.hit_pct_decode().map(|pct| rounded(pct, 3)).into(),
            rounded(mib(outcome.total_read_bytes()), 1).into(),
            outcome.moved_bytes().into(),
            regret_mib.into(),
            outcome.evictions.into(),
            outcome.look_ups.iter().sum::<u64>().into(),
            outcome.hits.iter().sum::<u64>().into(),
        ];
        if let Some(machine) = &self.machine {
            let speed = machine.speed(&self.needs, row);
            let bounds = |value: fn(Speed) -> f64| speed.map(|speed| rounded(value(speed), 3));
            cells.push(bounds(|speed| speed.tokens_s_min).into());
            cells.push(bounds(|speed| speed.tokens_s_max).into());
            if machine.memory_bytes_per_s.is_some() {
                let s_mbu = speed.and_then(|speed| speed.s_mbu_pct);
                cells.push(s_mbu.map(|(min, _)| rounded(min, 1)).into());
                cells.push(s_mbu.map(|(_, max)| rounded(max, 1)).into());
            }
            if machine.cpu.is_some() {
                let both = speed.zip(machine.speed_without(&self.needs));
                let times =
                    |of: fn(Speed) -> f64| both.map(|(with, without)| of(with) / of(without));
                let serial = times(|speed| speed.tokens_s_min);
                let overlap = times(|speed| speed.tokens_s_max);
                cells.push(serial.map(|times| rounded(times, 3)).into());
                cells.push(overlap.map(|times| rounded(times, 3)).into());
            }
        }
        cells
    }
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
    let mib = |bytes: u64| format!("{:.1} MiB", bytes as f64 / MIB as f64);
    let total = experts.total_bytes();
    ctx.remark(format_args!(
        "{} of {} in {}; all experts take {}",
        counted(batches.n_look_ups(), "look-up"),
        counted(experts.len() as u64, "expert"),
        counted(experts.n_layer() as u64, "layer"),
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
        let whole_model = inputs.model_bytes.map(|bytes| {
            let rest = mib(bytes.saturating_sub(total));
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
