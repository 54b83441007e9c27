//! The tables of `--table`.

use std::io::{self, Write};

use moe_analysis::accesses::{
    AccessReport, Direction, Distances, LayerCoverage, LayerSpan, LayerVolume,
};
use moe_trace::{LayerId, Phase};

use super::TableChoice;
use crate::output::{Cell, Format, Table};

/// Writes the rows of a table.
pub fn write(
    out: &mut dyn Write,
    report: &AccessReport,
    table: TableChoice,
    format: Format,
) -> io::Result<()> {
    match table {
        TableChoice::Figures => figures(report).write(out, format),
        TableChoice::Layers => layers(report).write(out, format),
        TableChoice::Seeks => seeks(report).write(out, format),
        TableChoice::WorkingSets => working_sets(report).write(out, format),
        TableChoice::Experts => experts(report).write(out, format),
        TableChoice::Reuse => reuse(report).write(out, format),
        TableChoice::Unresolved => unresolved(report).write(out, format),
    }
}

/// A row of the table `figures`.
#[derive(Clone)]
struct Figure {
    name: &'static str,
    phase: Option<&'static str>,
    value: Cell<'static>,
}

/// Returns the figures that are single numbers. [`AccessReport`] defines them.
fn figures(report: &AccessReport) -> Table<'_, impl Iterator + Clone> {
    let mut figures = Vec::new();
    let mut add = |name: &'static str, phase: Option<&'static str>, value: Cell<'static>| {
        figures.push(Figure { name, phase, value });
    };
    let order = &report.order;
    for (figure, value) in [
        ("passes_with_layers", order.passes),
        ("passes_in_order", order.passes_in_order),
        ("layer_steps", order.steps),
        ("layer_steps_to_next", order.steps_to_next),
        ("layer_steps_back", order.steps_back),
    ] {
        add(figure, None, value.into());
    }
    for (phase, volume) in Phase::ALL.map(Phase::name).into_iter().zip(&report.phases) {
        let pass_bytes = volume.pass_bytes;
        for (figure, value) in [
            ("passes", volume.passes.into()),
            ("tokens", volume.tokens.into()),
            ("accesses", volume.accesses.into()),
            ("bytes", volume.bytes.into()),
            ("expert_bytes", volume.expert_bytes.into()),
            ("bytes_per_token", volume.bytes_per_token().into()),
            ("min_bytes_of_a_pass", pass_bytes.map(|(min, _)| min).into()),
            ("max_bytes_of_a_pass", pass_bytes.map(|(_, max)| max).into()),
        ] {
            add(figure, Some(phase), value);
        }
    }
    let (lookups, seeks, reuse) = (&report.lookups, &report.seeks, &report.reuse);
    let coverage = report.coverage.iter();
    let unresolved = report.unresolved.iter();
    for (figure, value) in [
        ("lookups", lookups.operations),
        ("lookup_rows", lookups.rows),
        ("lookup_bytes", lookups.bytes),
        ("seek_accesses", seeks.accesses),
        ("seek_bytes", seeks.bytes),
        ("sequential_accesses", seeks.sequential),
        ("sequential_bytes", seeks.sequential_bytes),
        ("seek_distance", seeks.distance),
        (
            "experts",
            coverage.clone().map(|layer| layer.n_expert).sum(),
        ),
        ("experts_touched", coverage.map(|layer| layer.either).sum()),
        ("expert_uses", reuse.uses),
        ("expert_reuses", reuse.reuses),
        ("model_bytes", report.model_bytes),
        (
            "unresolved_accesses",
            unresolved.map(|source| source.n_accesses).sum(),
        ),
    ] {
        add(figure, None, value.into());
    }
    Table::of(figures)
        .column("figure", "figure", |figure| figure.name)
        .column("phase", "phase", |figure| figure.phase)
        .column("value", "value", |figure| figure.value.clone())
}

/// Reads of a layer in a phase.
#[derive(Clone, Copy)]
struct Layer<'a> {
    volume: &'a LayerVolume,
    /// Tokens of the phase.
    tokens: u64,
    coverage: Option<&'a LayerCoverage>,
    span: Option<&'a LayerSpan>,
}

/// Returns one row per layer and phase. The layer is null for tensors outside of layers.
fn layers(report: &AccessReport) -> Table<'_, impl Iterator + Clone> {
    let layers = report.layers.iter().map(|volume| {
        let is_it = |layer: LayerId| Some(layer) == volume.layer;
        let mut coverage = report.coverage.iter();
        let mut spans = report.spans.iter();
        Layer {
            volume,
            tokens: report.phases[usize::from(volume.phase.number())].tokens,
            coverage: coverage.find(|coverage| is_it(coverage.layer)),
            span: spans.find(|span| is_it(span.layer) && span.phase == volume.phase),
        }
    });
    Table::of(layers)
        .column("layer_id", "layer", |layer| layer.volume.layer)
        .column("phase", "phase", |layer| layer.volume.phase.name())
        .column("accesses", "accesses", |layer| layer.volume.accesses)
        .column("bytes", "read (bytes)", |layer| layer.volume.bytes)
        .column("expert_bytes", "experts (bytes)", |layer| {
            layer.volume.expert_bytes
        })
        .column("bytes_per_token", "bytes/token", |layer| {
            (layer.tokens > 0).then(|| layer.volume.bytes as f64 / layer.tokens as f64)
        })
        .column("n_expert", "experts", |layer| {
            layer.coverage.map(|coverage| coverage.n_expert)
        })
        .column("experts_touched", "experts touched", |layer| {
            layer.coverage.map(|coverage| match layer.volume.phase {
                Phase::Prompt => coverage.prompt,
                Phase::Generate => coverage.generate,
            })
        })
        .column("span_mean_ns", "first to last access, mean (ns)", |layer| {
            layer.span.and_then(|span| span.stats.mean_ns())
        })
        .column("span_min_ns", "first to last access, min (ns)", |layer| {
            layer.span.map(|span| span.stats.min_ns)
        })
        .column("span_max_ns", "first to last access, max (ns)", |layer| {
            layer.span.map(|span| span.stats.max_ns)
        })
}

fn seeks(report: &AccessReport) -> Table<'_, impl Iterator + Clone> {
    Table::of(&report.seeks.buckets)
        .column("direction", "direction", |bucket| match bucket.direction {
            Direction::Forward => "forward",
            Direction::Backward => "backward",
            Direction::OtherFile => "other_file",
        })
        .column("from", "from (bytes)", |bucket| bucket.from)
        .column("below", "below (bytes)", |bucket| bucket.below)
        .column("accesses", "accesses", |bucket| bucket.accesses)
        .column("bytes", "read (bytes)", |bucket| bucket.bytes)
}

fn working_sets(report: &AccessReport) -> Table<'_, impl Iterator + Clone> {
    let model_bytes = report.model_bytes.max(1) as f64;
    Table::of(&report.working_sets)
        .column("tokens", "window (tokens)", |set| set.tokens)
        .column("windows", "windows", |set| set.windows)
        .column("mean_bytes", "mean (bytes)", |set| set.mean_bytes())
        .column("min_bytes", "min (bytes)", |set| {
            (set.windows > 0).then_some(set.min_bytes)
        })
        .column("max_bytes", "max (bytes)", |set| {
            (set.windows > 0).then_some(set.max_bytes)
        })
        .column("share_of_model", "fraction of the model", move |set| {
            set.mean_bytes().map(|bytes| bytes / model_bytes)
        })
        .column("mean_experts", "experts, mean", |set| set.mean_experts())
}

fn experts(report: &AccessReport) -> Table<'_, impl Iterator + Clone> {
    let min = |distances: &Distances| (distances.n > 0).then_some(distances.min);
    let max = |distances: &Distances| (distances.n > 0).then_some(distances.max);
    Table::of(&report.reuse.experts)
        .column("layer_id", "layer", |expert| expert.layer)
        .column("expert_id", "expert", |expert| expert.expert)
        .column("size_bytes", "size (bytes)", |expert| expert.size_bytes)
        .column("uses", "uses", |expert| expert.uses)
        .column("mean_tokens", "reuse distance, mean (tokens)", |expert| {
            expert.tokens.mean()
        })
        .column("min_tokens", "min (tokens)", move |expert| {
            min(&expert.tokens)
        })
        .column("max_tokens", "max (tokens)", move |expert| {
            max(&expert.tokens)
        })
        .column("mean_bytes", "reuse distance, mean (bytes)", |expert| {
            expert.bytes.mean()
        })
        .column("min_bytes", "min (bytes)", move |expert| min(&expert.bytes))
        .column("max_bytes", "max (bytes)", move |expert| max(&expert.bytes))
}

/// Returns both histograms of reuse distances. `below` is null in the last bucket.
fn reuse(report: &AccessReport) -> Table<'_, impl Iterator + Clone> {
    let histograms = [
        ("tokens", &report.reuse.tokens),
        ("bytes", &report.reuse.bytes),
    ];
    let buckets = histograms.into_iter().flat_map(|(unit, histogram)| {
        let buckets = histogram.buckets();
        buckets.map(move |(from, below, reuses)| (unit, from, below, reuses))
    });
    let buckets: Vec<_> = buckets.collect();
    Table::of(buckets)
        .column("distance", "unit of the distance", |&(unit, ..)| unit)
        .column("from", "from", |&(_, from, ..)| from)
        .column("below", "below", |&(_, _, below, _)| below)
        .column("reuses", "reuses", |&(.., reuses)| reuses)
}

fn unresolved(report: &AccessReport) -> Table<'_, impl Iterator + Clone> {
    Table::of(&report.unresolved)
        .column("name", "name", |source| source.name.as_str())
        .column("file_offset", "file offset (bytes)", |source| {
            source.file_offset
        })
        .column("size_bytes", "size (bytes)", |source| source.size_bytes)
        .column("accesses", "accesses", |source| source.n_accesses)
}
