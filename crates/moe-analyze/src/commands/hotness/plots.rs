//! The plots of `--plot`.

use std::path::Path;

use anyhow::bail;
use moe_analysis::hotness::{Matrix, Value};
use moe_files::AtomicFile;

use super::args::{Args, PlotKind};
use super::matrix;
use crate::counting::inputs::Counted;
use crate::counting::sentences;
use crate::plot::{Axis, Chart, Figure, HeatMap, Line};

/// Draws the plot of `--plot-kind`, which appears at its path on commit.
pub fn prepare(args: &Args, counted: &Counted, path: &Path) -> anyhow::Result<AtomicFile> {
    let figure = match args.plot_kind {
        PlotKind::HeatMap => heat_map(args, counted)?,
        PlotKind::Entropy => entropy(args, counted),
    };
    figure.prepare(path, args.force)
}

/// Returns the heat map of each layer's values relative to a uniform share.
fn heat_map(args: &Args, counted: &Counted) -> anyhow::Result<Figure> {
    if args.by.is_some() {
        bail!(
            "a heat map shows the unsplit matrix; omit --by, or write the split matrix with --matrix"
        );
    }
    let matrix = matrix::matrix(args, counted);
    let n_expert = counted.hotness.n_expert() as usize;
    let cells = cells(&matrix, args.value());
    let layers = cells.chunks(n_expert.max(1)).map(|layer| {
        let total: f64 = layer.iter().sum();
        let uniform = if total > 0.0 {
            total / n_expert as f64
        } else {
            1.0
        };
        let mut values: Vec<f64> = layer.iter().map(|value| value / uniform).collect();
        if args.sorted {
            values.sort_unstable_by(|a, b| b.total_cmp(a));
        }
        values
    });
    let what = match args.value() {
        Value::Count => "Activations of each expert",
        Value::Mass => "Sum of router weights of each expert",
        Value::Bytes => "Bytes read of each expert",
    };
    let order = if args.sorted { ", hottest first" } else { "" };
    let map = HeatMap {
        title: format!("{what}{order}"),
        subtitle: sentences::subtitle(&args.inputs, &counted.hotness),
        x_label: if args.sorted {
            "rank of expert in its layer"
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

/// Returns the chart of each layer's normalized entropy and Gini coefficient.
fn entropy(args: &Args, counted: &Counted) -> Figure {
    let layers = counted.hotness.summary(args.phases(), 0);
    let line = |value: fn(&moe_analysis::hotness::LayerSummary) -> f64| -> Vec<(f64, f64)> {
        let points = layers.iter().map(|l| (f64::from(l.layer.0), value(l)));
        points.collect()
    };
    let number = |layer: Option<&moe_analysis::hotness::LayerSummary>| {
        layer.map_or(0.0, |layer| f64::from(layer.layer.0))
    };
    let (first, last) = (number(layers.first()), number(layers.last()));
    Chart {
        title: "Balance of expert activations in each layer".into(),
        subtitle: sentences::subtitle(&args.inputs, &counted.hotness),
        x: Axis::integers("layer", first, last),
        y: Axis::numbers("normalized entropy, Gini coefficient", 0.0, 1.0),
        lines: vec![
            Line::strong("entropy (1 = uniform)", line(|l| l.load_balance.entropy)),
            Line::new(
                "Gini coefficient (0 = uniform)",
                line(|l| l.load_balance.gini),
            ),
        ],
    }
    .figure()
}
