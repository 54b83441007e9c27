//! The report for reading.

use std::io::{self, Write};

use moe_analysis::accesses::{AccessReport, Histogram, PhaseVolume};
use moe_gguf::text::counted;

use crate::output::{Cell, Format, human_bytes, write_rows};

pub fn print(out: &mut dyn Write, report: &AccessReport) -> io::Result<()> {
    let order = &report.order;
    writeln!(
        out,
        "layers: in order in {} of {}; {} % of steps go to the next layer, {} back",
        order.passes_in_order,
        counted(order.passes, "pass"),
        percent(order.steps_to_next, order.steps),
        order.steps_back
    )?;
    let seeks = &report.seeks;
    writeln!(
        out,
        "file: {} % of accesses read on where the one before ended ({} % of bytes); seeks over {} in all",
        percent(seeks.sequential, seeks.accesses),
        percent(seeks.sequential_bytes, seeks.bytes),
        human_bytes(seeks.distance)
    )?;
    let experts = report.coverage.iter().map(|layer| layer.n_expert).sum();
    let touched = report.coverage.iter().map(|layer| layer.either).sum();
    writeln!(
        out,
        "experts: {touched} of {experts} touched ({} %), {} uses, {} % of them of an expert used before",
        percent(touched, experts),
        report.reuse.uses,
        percent(report.reuse.reuses, report.reuse.uses)
    )?;
    writeln!(
        out,
        "reuse distance: half are within {}, nine of ten within {}; in bytes read between: {} and {}",
        tokens(quantile(&report.reuse.tokens, 0.5)),
        tokens(quantile(&report.reuse.tokens, 0.9)),
        bytes_below(quantile(&report.reuse.bytes, 0.5)),
        bytes_below(quantile(&report.reuse.bytes, 0.9)),
    )?;
    writeln!(
        out,
        "look-ups: {} of {}, {}\n",
        counted(report.lookups.operations, "operation"),
        counted(report.lookups.rows, "row"),
        human_bytes(report.lookups.bytes)
    )?;
    print_phases(out, &report.phases)?;
    writeln!(out)?;
    print_working_sets(out, report)?;
    writeln!(out)?;
    print_layers(out, report)
}

fn print_phases(out: &mut dyn Write, phases: &[PhaseVolume; 2]) -> io::Result<()> {
    let columns = [
        "phase",
        "passes",
        "tokens",
        "bytes read",
        "of experts",
        "a token",
        "least of a pass",
        "most",
    ];
    let rows = ["prompt", "generated"]
        .into_iter()
        .zip(phases)
        .map(|(name, phase)| -> Vec<Cell> {
            let per_token = phase
                .bytes_per_token()
                .map(|bytes| human_bytes(bytes as u64));
            vec![
                name.into(),
                phase.passes.into(),
                phase.tokens.into(),
                human_bytes(phase.bytes).into(),
                format!("{} %", percent(phase.expert_bytes, phase.bytes)).into(),
                per_token.into(),
                phase.pass_bytes.map(|bytes| human_bytes(bytes.0)).into(),
                phase.pass_bytes.map(|bytes| human_bytes(bytes.1)).into(),
            ]
        });
    write_rows(out, Format::Table, &columns, rows)
}

fn print_working_sets(out: &mut dyn Write, report: &AccessReport) -> io::Result<()> {
    let columns = [
        "tokens in a window",
        "windows",
        "working set",
        "least",
        "most",
        "% of the model",
        "experts",
    ];
    let sets = report.working_sets.iter().filter(|set| set.windows > 0);
    let rows = sets.map(|set| -> Vec<Cell> {
        let mean = set.mean_bytes().unwrap_or(0.0);
        vec![
            set.tokens.into(),
            set.windows.into(),
            human_bytes(mean as u64).into(),
            human_bytes(set.min_bytes).into(),
            human_bytes(set.max_bytes).into(),
            format!("{:.1}", 100.0 * mean / report.model_bytes.max(1) as f64).into(),
            format!("{:.1}", set.mean_experts().unwrap_or(0.0)).into(),
        ]
    });
    write_rows(out, Format::Table, &columns, rows)
}

fn print_layers(out: &mut dyn Write, report: &AccessReport) -> io::Result<()> {
    let columns = [
        "layer",
        "bytes for a generated token",
        "of experts",
        "experts touched",
        "first to last access, µs",
    ];
    let tokens = report.phases[1].tokens;
    let rows = report
        .layers
        .iter()
        .filter(|layer| layer.phase == 1)
        .map(|layer| -> Vec<Cell> {
            let is_it = |other: u16| Some(other) == layer.layer;
            let coverage = report
                .coverage
                .iter()
                .find(|coverage| is_it(coverage.layer));
            let span = report
                .spans
                .iter()
                .find(|span| is_it(span.layer) && span.phase == 1);
            vec![
                layer
                    .layer
                    .map_or("none".into(), |layer| layer.to_string())
                    .into(),
                human_bytes(layer.bytes.checked_div(tokens).unwrap_or(0)).into(),
                format!("{} %", percent(layer.expert_bytes, layer.bytes)).into(),
                coverage
                    .map(|c| format!("{} of {}", c.generate, c.n_expert))
                    .into(),
                span.and_then(|span| span.spread.mean_ns())
                    .map(|ns| format!("{:.1}", ns / 1000.0))
                    .into(),
            ]
        });
    write_rows(out, Format::Table, &columns, rows)
}

fn percent(part: u64, whole: u64) -> String {
    format!("{:.1}", 100.0 * part as f64 / whole.max(1) as f64)
}

/// The upper bound of the bucket that contains the quantile `share` (0.5: the median) of the values; `None` without values, or if
/// the bucket has no bound.
fn quantile(histogram: &Histogram, share: f64) -> Option<u64> {
    let total: u64 = histogram.buckets().map(|(.., n)| n).sum();
    let mut seen = 0;
    histogram.buckets().find_map(|(_, below, n)| {
        seen += n;
        (seen as f64 >= share * total as f64).then_some(below)
    })?
}

fn tokens(below: Option<u64>) -> String {
    below.map_or("-".into(), |below| counted(below - 1, "token"))
}

fn bytes_below(below: Option<u64>) -> String {
    below.map_or("-".into(), |below| format!("below {}", human_bytes(below)))
}
