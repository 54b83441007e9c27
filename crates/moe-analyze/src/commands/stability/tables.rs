//! The tables of `--table`. Each has at most a few rows per layer, independent of the length of the trace.

use std::io::{self, Write};

use moe_analysis::measures::{Specialization, mutual_information, specialization, total_variation};
use moe_analysis::stability::{self, Split};
use moe_placement::learn::LayerCounts;
use moe_trace::LayerId;

use super::args::{Args, TableChoice};
use crate::counting::inputs::Counted;
use crate::output::{Format, Table, or_all};

/// Writes the selected table; `splits` are the rows of [`TableChoice::Split`].
pub fn write(
    out: &mut dyn Write,
    format: Format,
    args: &Args,
    counted: &Counted,
    splits: &[Split],
) -> io::Result<()> {
    match args.table() {
        TableChoice::Split => split(out, format, splits),
        TableChoice::Drift => drift(out, format, counted),
        TableChoice::Convergence => convergence(out, format, counted),
        TableChoice::Bootstrap => bootstrap(out, format, args, counted),
        TableChoice::Domains => domains(out, format, args, counted),
    }
}

/// Writes one row per held-out split and size of the hot set.
pub fn split(out: &mut dyn Write, format: Format, splits: &[Split]) -> io::Result<()> {
    let rows = splits.iter().flat_map(|split| {
        let coverage = split.coverage.iter();
        coverage.map(move |coverage| (split, coverage))
    });
    Table::of(rows)
        .column("tested", "held-out split", |(split, _)| {
            split.held_out.as_str()
        })
        .column("rows_training", "training split (tokens)", |(split, _)| {
            split.train_tokens
        })
        .column("rows_tested", "held-out split (tokens)", |(split, _)| {
            split.held_out_tokens
        })
        .column("percent", "hottest experts (%)", |(_, coverage)| {
            coverage.percent
        })
        .column(
            "in_sample",
            "coverage, in-sample (fraction)",
            |(_, coverage)| coverage.in_sample,
        )
        .column(
            "out_of_sample",
            "coverage, out-of-sample (fraction)",
            |(_, coverage)| coverage.out_of_sample,
        )
        .column(
            "uniform",
            "coverage, uniform router (fraction)",
            |(_, coverage)| coverage.uniform,
        )
        .write(out, format)
}

fn drift(out: &mut dyn Write, format: Format, counted: &Counted) -> io::Result<()> {
    let rows = stability::drift(&counted.survey, counted.hotness.n_expert());
    Table::of(&rows)
        .column("layer_id", "layer", move |row| or_all(row.layer, format))
        .column("from", "from eighth", |row| row.from)
        .column("to", "to eighth", |row| row.to)
        .column("rows", "tokens", |row| row.tokens)
        .column("total_variation", "total variation (0..1)", |row| {
            row.total_variation
        })
        .column("noise", "total variation, expected by chance", |row| {
            row.noise
        })
        .column("jaccard", "Jaccard index of hot sets (0..1)", |row| {
            row.jaccard
        })
        .write(out, format)
}

fn convergence(out: &mut dyn Write, format: Format, counted: &Counted) -> io::Result<()> {
    let rows = stability::convergence(&counted.survey, counted.hotness.n_expert());
    Table::of(&rows)
        .column("layer_id", "layer", |row| row.layer)
        .column("rows", "tokens", |row| row.tokens)
        .column(
            "converged_after",
            "hot set unchanged after (tokens)",
            |row| row.converged,
        )
        .column(
            "almost_converged_after",
            "hot set almost unchanged after (tokens)",
            |row| row.almost_converged,
        )
        .write(out, format)
}

fn bootstrap(
    out: &mut dyn Write,
    format: Format,
    args: &Args,
    counted: &Counted,
) -> io::Result<()> {
    let n_expert = counted.hotness.n_expert();
    let n = args.resamples as usize;
    let intervals = stability::bootstrap(&counted.survey, n_expert, n, args.seed);
    Table::of(&intervals)
        .column("measure", "measure", |row| row.measure.as_str())
        .column("value", "value", |row| row.value)
        .column("low", "95 % interval, low", |row| row.low)
        .column("high", "95 % interval, high", |row| row.high)
        .write(out, format)
}

/// Experts of a layer in a domain.
struct Domain<'a> {
    layer: LayerId,
    label: &'a str,
    tokens: u64,
    /// Mutual information of expert and domain in the layer.
    information_bits: f64,
    /// Distance from all other domains.
    total_variation: Option<f64>,
    most_used: Option<Specialization>,
    /// Fraction of the tokens that select an expert of a uniform router.
    uniform: f64,
}

fn domains(out: &mut dyn Write, format: Format, args: &Args, counted: &Counted) -> io::Result<()> {
    let Counted {
        hotness, survey, ..
    } = counted;
    let groups = survey.labels();
    let mut rows = Vec::new();
    for layer in hotness.layers(args.inputs.phases()) {
        let counts: Vec<Vec<u64>> = (0..groups.names().len())
            .map(|group| groups.counts(group, layer))
            .collect();
        let slices: Vec<&[u64]> = counts.iter().map(Vec::as_slice).collect();
        let information_bits = mutual_information(&slices);
        for (group, label) in groups.names().iter().enumerate() {
            let mut others = vec![0u64; hotness.n_expert() as usize];
            let other_counts = counts.iter().enumerate().filter(|(at, _)| *at != group);
            for (sum, count) in other_counts.flat_map(|(_, counts)| counts.iter().enumerate()) {
                if let Some(sum) = others.get_mut(sum) {
                    *sum = sum.saturating_add(*count);
                }
            }
            let n_tokens = match groups.routed_tokens(group, layer) {
                0 => tokens_of_counts(&counts[group], hotness.n_expert_used()),
                n_tokens => n_tokens,
            };
            rows.push(Domain {
                layer,
                label,
                tokens: n_tokens,
                information_bits,
                total_variation: total_variation(&counts[group], &others),
                most_used: specialization(&counts[group], n_tokens),
                uniform: f64::from(hotness.n_expert_used()) / f64::from(hotness.n_expert().max(1)),
            });
        }
    }
    Table::of(&rows)
        .column("layer_id", "layer", |row| row.layer)
        .column("label", "domain", |row| row.label)
        .column("rows", "tokens", |row| row.tokens)
        .column("information_bits", "mutual information (bits)", |row| {
            row.information_bits
        })
        .column("total_variation", "total variation (0..1)", |row| {
            row.total_variation
        })
        .column("expert_id", "most used expert", |row| {
            Some(row.most_used?.expert)
        })
        .column("specialisation", "its tokens (fraction of domain)", |row| {
            Some(row.most_used?.share_of_tokens)
        })
        .column("over_uniform", "relative to a uniform router (×)", |row| {
            Some(row.most_used?.share_of_tokens / row.uniform)
        })
        .write(out, format)
}

/// Returns the number of tokens, computed from counts.
fn tokens_of_counts(counts: &[u64], n_expert_used: u32) -> u64 {
    let activations = counts
        .iter()
        .fold(0u64, |sum, &count| sum.saturating_add(count));
    LayerCounts::tokens_of(activations, n_expert_used.max(1))
}
