//! The report as rows of named columns.

use moe_analysis::accesses::{AccessReport, Direction, Distances, Histogram};

use crate::output::Cell;

/// Names of the columns, and the rows.
pub type Rows<'a> = (&'static [&'static str], Vec<Vec<Cell<'a>>>);

/// Names of the phases in rows, by number.
const PHASES: [&str; 2] = ["PROMPT", "GENERATE"];

/// Every figure that is one number. What a figure means is told where [`AccessReport`] defines it.
pub fn figures(report: &AccessReport) -> Rows<'_> {
    let mut rows = Vec::new();
    let mut add = |figure: &'static str, phase: Option<&'static str>, value: Cell<'static>| {
        rows.push(vec![figure.into(), phase.into(), value]);
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
    for (phase, volume) in PHASES.into_iter().zip(&report.phases) {
        for (figure, value) in [
            ("passes", volume.passes),
            ("tokens", volume.tokens),
            ("accesses", volume.accesses),
            ("bytes", volume.bytes),
            ("expert_bytes", volume.expert_bytes),
        ] {
            add(figure, Some(phase), value.into());
        }
        add(
            "bytes_per_token",
            Some(phase),
            volume.bytes_per_token().into(),
        );
        add(
            "min_bytes_of_a_pass",
            Some(phase),
            volume.pass_bytes.map(|bytes| bytes.0).into(),
        );
        add(
            "max_bytes_of_a_pass",
            Some(phase),
            volume.pass_bytes.map(|bytes| bytes.1).into(),
        );
    }
    let (lookups, seeks, reuse) = (&report.lookups, &report.seeks, &report.reuse);
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
            report.coverage.iter().map(|layer| layer.n_expert).sum(),
        ),
        (
            "experts_touched",
            report.coverage.iter().map(|layer| layer.either).sum(),
        ),
        ("expert_uses", reuse.uses),
        ("expert_reuses", reuse.reuses),
        ("model_bytes", report.model_bytes),
        (
            "unresolved_accesses",
            report
                .unresolved
                .iter()
                .map(|source| source.n_accesses)
                .sum(),
        ),
    ] {
        add(figure, None, value.into());
    }
    (&["figure", "phase", "value"], rows)
}

/// A row a layer and phase; the layer is null for what belongs to none.
pub fn layers(report: &AccessReport) -> Rows<'_> {
    let columns = &[
        "layer_id",
        "phase",
        "accesses",
        "bytes",
        "expert_bytes",
        "bytes_per_token",
        "n_expert",
        "experts_touched",
        "span_mean_ns",
        "span_min_ns",
        "span_max_ns",
    ];
    let rows = report.layers.iter().map(|volume| {
        let tokens = report.phases[volume.phase].tokens;
        let per_token = (tokens > 0).then(|| volume.bytes as f64 / tokens as f64);
        let is_it = |layer: u16| Some(layer) == volume.layer;
        let coverage = report
            .coverage
            .iter()
            .find(|coverage| is_it(coverage.layer));
        let touched = coverage.map(|coverage| match volume.phase {
            0 => coverage.prompt,
            _ => coverage.generate,
        });
        let span = report
            .spans
            .iter()
            .find(|span| is_it(span.layer) && span.phase == volume.phase);
        vec![
            volume.layer.into(),
            PHASES[volume.phase].into(),
            volume.accesses.into(),
            volume.bytes.into(),
            volume.expert_bytes.into(),
            per_token.into(),
            coverage.map(|coverage| coverage.n_expert).into(),
            touched.into(),
            span.and_then(|span| span.spread.mean_ns()).into(),
            span.map(|span| span.spread.min_ns).into(),
            span.map(|span| span.spread.max_ns).into(),
        ]
    });
    (columns, rows.collect())
}

pub fn seeks(report: &AccessReport) -> Rows<'_> {
    let rows = report.seeks.buckets.iter().map(|bucket| {
        let direction = match bucket.direction {
            Direction::Forward => "forward",
            Direction::Backward => "backward",
            Direction::OtherFile => "other_file",
        };
        vec![
            direction.into(),
            bucket.from.into(),
            bucket.below.into(),
            bucket.accesses.into(),
            bucket.bytes.into(),
        ]
    });
    (
        &["direction", "from", "below", "accesses", "bytes"],
        rows.collect(),
    )
}

pub fn working_sets(report: &AccessReport) -> Rows<'_> {
    let columns = &[
        "tokens",
        "windows",
        "mean_bytes",
        "min_bytes",
        "max_bytes",
        "share_of_model",
        "mean_experts",
    ];
    let rows = report.working_sets.iter().map(|set| {
        let share = set
            .mean_bytes()
            .map(|bytes| bytes / report.model_bytes.max(1) as f64);
        let of_windows = |value: u64| Some(value).filter(|_| set.windows > 0);
        vec![
            set.tokens.into(),
            set.windows.into(),
            set.mean_bytes().into(),
            of_windows(set.min_bytes).into(),
            of_windows(set.max_bytes).into(),
            share.into(),
            set.mean_experts().into(),
        ]
    });
    (columns, rows.collect())
}

pub fn experts(report: &AccessReport) -> Rows<'_> {
    let columns = &[
        "layer_id",
        "expert_id",
        "size_bytes",
        "uses",
        "mean_tokens",
        "min_tokens",
        "max_tokens",
        "mean_bytes",
        "min_bytes",
        "max_bytes",
    ];
    let rows = report.reuse.experts.iter().map(|expert| {
        let distances = |distances: &Distances| -> [Cell<'static>; 3] {
            let of_some = |value: u64| Some(value).filter(|_| distances.n > 0);
            [
                distances.mean().into(),
                of_some(distances.min).into(),
                of_some(distances.max).into(),
            ]
        };
        let mut row: Vec<Cell> = vec![
            expert.layer.into(),
            expert.expert.into(),
            expert.size_bytes.into(),
            expert.uses.into(),
        ];
        row.extend(distances(&expert.tokens));
        row.extend(distances(&expert.bytes));
        row
    });
    (columns, rows.collect())
}

/// Both histograms; `below` is null in the last bucket of all.
pub fn reuse(report: &AccessReport) -> Rows<'_> {
    let of = |distance: &'static str, histogram: &Histogram| -> Vec<Vec<Cell<'static>>> {
        let buckets = histogram.buckets();
        let row = |(from, below, count): (u64, Option<u64>, u64)| {
            vec![distance.into(), from.into(), below.into(), count.into()]
        };
        buckets.map(row).collect()
    };
    let mut rows = of("tokens", &report.reuse.tokens);
    rows.extend(of("bytes", &report.reuse.bytes));
    (&["distance", "from", "below", "reuses"], rows)
}

pub fn unresolved(report: &AccessReport) -> Rows<'_> {
    let rows = report.unresolved.iter().map(|source| {
        vec![
            source.name.as_str().into(),
            source.file_offset.into(),
            source.size_bytes.into(),
            source.n_accesses.into(),
        ]
    });
    (
        &["name", "file_offset", "size_bytes", "accesses"],
        rows.collect(),
    )
}
