//! The plots of `--plot`.

use std::path::Path;

use anyhow::bail;
use moe_analysis::hotness::{Matrix, Value};
use moe_analysis::measures::hottest;
use moe_analysis::stability::{Curve, curves};
use moe_files::AtomicFile;

use super::args::{Args, PictureChoice};
use super::input::Counted;
use super::matrix;
use super::summary::counted_tokens;
use crate::plot::{Axis, Chart, Figure, HeatMap, Line};

/// Draws what the user asked for.
pub fn prepare(args: &Args, counted: &Counted, path: &Path) -> anyhow::Result<AtomicFile> {
    let figure = match args.picture {
        PictureChoice::HeatMap => heat_map(args, counted)?,
        PictureChoice::Coverage => coverage(args, counted),
        PictureChoice::Entropy => entropy(args, counted),
    };
    figure.prepare(path, args.force)
}

fn subtitle(args: &Args, counted: &Counted) -> String {
    let text = counted_tokens(&counted.hotness, args.phase);
    format!("{}: {text}", args.source())
}

/// Each layer's values relative to an even share.
fn heat_map(args: &Args, counted: &Counted) -> anyhow::Result<Figure> {
    if args.by.is_some() {
        bail!("a heat map is of the whole matrix; leave out --by, or write it with --matrix");
    }
    let matrix = matrix::matrix(args, counted)?;
    let n_expert = counted.hotness.n_expert() as usize;
    let cells = cells(&matrix, args.value());
    let layers = cells.chunks(n_expert.max(1)).map(|layer| {
        let total: f64 = layer.iter().sum();
        let even = if total > 0.0 {
            total / n_expert as f64
        } else {
            1.0
        };
        let mut values: Vec<f64> = layer.iter().map(|value| value / even).collect();
        if args.sorted {
            values.sort_unstable_by(|a, b| b.total_cmp(a));
        }
        values
    });
    let what = match args.value() {
        Value::Count => "How often each expert is chosen",
        Value::Mass => "Router weight of each expert",
        Value::Bytes => "Bytes read for each expert",
    };
    let order = if args.sorted { ", hottest first" } else { "" };
    let map = HeatMap {
        title: format!("{what}{order}"),
        subtitle: subtitle(args, counted),
        x_label: if args.sorted {
            "rank of the expert in its layer"
        } else {
            "expert"
        },
        values: layers.collect(),
        layers: matrix.layers().to_vec(),
    };
    Ok(map.figure())
}

fn cells(matrix: &Matrix<'_>, value: Value) -> Vec<f64> {
    let cells = matrix.rows().map(|row| match value {
        Value::Count => row.count as f64,
        Value::Mass => row.mass.unwrap_or(0.0),
        Value::Bytes => row.bytes.unwrap_or(0) as f64,
    });
    cells.collect()
}

/// Coverage of a static set in every layer, by its size: of all tokens, and learned on the first half and tested on the second.
fn coverage(args: &Args, counted: &Counted) -> Figure {
    let hotness = &counted.hotness;
    let n_expert = hotness.n_expert() as usize;
    let layers = hotness.layers(args.phases()).into_iter();
    let layers: Vec<Vec<u64>> = layers.map(|l| hotness.counts(l, args.phases())).collect();
    let whole: Vec<f64> = covered(&layers, n_expert);
    let x = |n: usize| 100.0 * n as f64 / n_expert.max(1) as f64;
    let points = |shares: &[f64]| -> Vec<(f64, f64)> {
        let shares = shares.iter().enumerate();
        shares.map(|(n, share)| (x(n), 100.0 * share)).collect()
    };
    let mut lines = vec![
        Line::reference("a uniform router", vec![(0.0, 0.0), (100.0, 100.0)]),
        Line::new("all tokens, learned on themselves", points(&whole)),
    ];
    if let Some(Curve {
        in_sample,
        out_of_sample,
    }) = curves(&counted.survey, n_expert, 0.5)
    {
        lines.push(Line::new(
            "the first half, learned on itself",
            points(&in_sample),
        ));
        lines.push(Line::strong(
            "the second half, learned on the first",
            points(&out_of_sample),
        ));
    }
    Chart {
        title: "Coverage of a set of the hottest experts".into(),
        subtitle: subtitle(args, counted),
        x: Axis::numbers("experts of each layer in the set (%)", 0.0, 100.0),
        y: Axis::numbers("selections covered (%)", 0.0, 100.0),
        lines,
    }
    .figure()
}

/// Share of the choices of all layers that the `n` hottest experts of each cover, for n from 0 to all.
fn covered(layers: &[Vec<u64>], n_expert: usize) -> Vec<f64> {
    let total: f64 = layers.iter().flatten().map(|&count| count as f64).sum();
    let mut shares = vec![0.0; n_expert + 1];
    for counts in layers {
        for (rank, expert) in hottest(counts, n_expert).into_iter().enumerate() {
            shares[rank + 1] += counts[expert] as f64 / total.max(1.0);
        }
    }
    for n in 1..shares.len() {
        shares[n] += shares[n - 1];
    }
    shares
}

/// Normalised entropy and Gini coefficient of each layer.
fn entropy(args: &Args, counted: &Counted) -> Figure {
    let layers = counted.hotness.summary(args.phases(), 0);
    let line = |value: fn(&moe_analysis::hotness::LayerSummary) -> f64| -> Vec<(f64, f64)> {
        let points = layers.iter().map(|l| (f64::from(l.layer), value(l)));
        points.collect()
    };
    let number = |layer: Option<&moe_analysis::hotness::LayerSummary>| {
        layer.map_or(0.0, |layer| f64::from(layer.layer))
    };
    let (first, last) = (number(layers.first()), number(layers.last()));
    Chart {
        title: "Balance of the experts in each layer".into(),
        subtitle: subtitle(args, counted),
        x: Axis::integers("layer", first, last),
        y: Axis::numbers("normalized entropy, Gini coefficient", 0.0, 1.0),
        lines: vec![
            Line::strong("entropy (1 = uniform)", line(|l| l.spread.entropy)),
            Line::new("Gini coefficient (0 = uniform)", line(|l| l.spread.gini)),
        ],
    }
    .figure()
}
