//! The summary of the report.

use std::io::{self, Write};

use moe_analysis::accesses::{AccessReport, Histogram, PhaseVolume};
use moe_files::text::counted;
use moe_trace::Phase;

use crate::output::{Format, Table, fixed, human_bytes};

pub fn print(out: &mut dyn Write, report: &AccessReport) -> io::Result<()> {
    let order = &report.order;
    writeln!(
        out,
        "layers: accessed in order in {} of {}; {} % of the changes of layer go to the next layer, {} go back",
        order.passes_in_order,
        counted(order.passes, "pass"),
        percent(order.steps_to_next, order.steps),
        order.steps_back
    )?;
    let seeks = &report.seeks;
    writeln!(
        out,
        "file: {} % of accesses are sequential ({} % of bytes); total seek distance {}",
        percent(seeks.sequential, seeks.accesses),
        percent(seeks.sequential_bytes, seeks.bytes),
        human_bytes(seeks.distance)
    )?;
    let experts = report.coverage.iter().map(|layer| layer.n_expert).sum();
    let touched = report.coverage.iter().map(|layer| layer.either).sum();
    writeln!(
        out,
        "experts: {touched} of {experts} touched ({} %); {} uses, of which {} % are reuses",
        percent(touched, experts),
        report.reuse.uses,
        percent(report.reuse.reuses, report.reuse.uses)
    )?;
    if report.reuse.reuses > 0 {
        writeln!(
            out,
            "reuse distance: median {}, 90th percentile {}; bytes read in between: median {}, 90th percentile {}",
            tokens(quantile(&report.reuse.tokens, 0.5)),
            tokens(quantile(&report.reuse.tokens, 0.9)),
            bytes_below(quantile(&report.reuse.bytes, 0.5)),
            bytes_below(quantile(&report.reuse.bytes, 0.9)),
        )?;
    }
    writeln!(
        out,
        "embedding lookups: {} read {}, {}\n",
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
    Table::of(["prompt", "generated"].into_iter().zip(phases))
        .shown("phase", |&(name, _)| name)
        .shown("passes", |(_, phase)| phase.passes)
        .shown("tokens", |(_, phase)| phase.tokens)
        .shown("read", |(_, phase)| human_bytes(phase.bytes))
        .shown("experts (% of read)", |(_, phase)| {
            fixed(share(phase.expert_bytes, phase.bytes), 1)
        })
        .shown("read/token", |(_, phase)| {
            let per_token = phase.bytes_per_token();
            per_token.map(|bytes| human_bytes(bytes as u64))
        })
        .shown("read/pass, min", |(_, phase)| {
            phase.pass_bytes.map(|(min, _)| human_bytes(min))
        })
        .shown("read/pass, max", |(_, phase)| {
            phase.pass_bytes.map(|(_, max)| human_bytes(max))
        })
        .write(out, Format::Table)
}

fn print_working_sets(out: &mut dyn Write, report: &AccessReport) -> io::Result<()> {
    let model_bytes = report.model_bytes.max(1) as f64;
    let sets = report.working_sets.iter().filter(|set| set.windows > 0);
    Table::of(sets)
        .shown("window (tokens)", |set| set.tokens)
        .shown("windows", |set| set.windows)
        .shown("working set, mean", |set| {
            human_bytes(set.mean_bytes().unwrap_or(0.0) as u64)
        })
        .shown("min", |set| human_bytes(set.min_bytes))
        .shown("max", |set| human_bytes(set.max_bytes))
        .shown("mean (% of model)", move |set| {
            fixed(set.mean_bytes().map(|mean| 100.0 * mean / model_bytes), 1)
        })
        .shown("experts, mean", |set| fixed(set.mean_experts(), 1))
        .write(out, Format::Table)
}

/// Prints the layers' reads in the decode phase.
fn print_layers(out: &mut dyn Write, report: &AccessReport) -> io::Result<()> {
    let tokens = report.phases[1].tokens;
    let layers = report
        .layers
        .iter()
        .filter(|layer| layer.phase == Phase::Generate);
    Table::of(layers)
        .shown("layer", |layer| match layer.layer {
            Some(layer) => layer.to_string(),
            None => "none".into(),
        })
        .shown("read/generated token", move |layer| {
            human_bytes(layer.bytes.checked_div(tokens).unwrap_or(0))
        })
        .shown("experts (% of read)", |layer| {
            fixed(share(layer.expert_bytes, layer.bytes), 1)
        })
        .shown("experts touched", |layer| {
            let mut coverage = report.coverage.iter();
            let coverage = coverage.find(|coverage| Some(coverage.layer) == layer.layer)?;
            Some(format!("{} of {}", coverage.generate, coverage.n_expert))
        })
        .shown("first to last access, mean (µs)", |layer| {
            let mut spans = report.spans.iter();
            let span =
                spans.find(|span| Some(span.layer) == layer.layer && span.phase == Phase::Generate);
            let mean_ns = span.and_then(|span| span.stats.mean_ns());
            fixed(mean_ns.map(|ns| ns / 1000.0), 1)
        })
        .write(out, Format::Table)
}

/// Returns `part` in percent of `whole`.
fn share(part: u64, whole: u64) -> f64 {
    100.0 * part as f64 / whole.max(1) as f64
}

fn percent(part: u64, whole: u64) -> String {
    format!("{:.1}", share(part, whole))
}

/// Returns the upper bound of the bucket that contains the quantile `share` (0.5: the median). Returns `None` without values, or if
/// the bucket has no upper bound.
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
