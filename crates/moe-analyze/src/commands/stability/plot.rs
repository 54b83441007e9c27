//! The plot of `--plot`.

use moe_analysis::measures::hottest;
use moe_analysis::stability::{Curve, curves};

use super::args::{Args, SplitChoice};
use crate::counting::inputs::Counted;
use crate::counting::sentences;
use crate::plot::{Axis, Chart, Figure, Line};

/// Returns the plot of coverage by the size of the hot set: of all tokens in-sample, and of the training and held-out splits. Without a
/// split by time, the training split is the first half of the tokens.
pub fn coverage(args: &Args, counted: &Counted) -> Figure {
    let hotness = &counted.hotness;
    let phases = args.inputs.phases();
    let n_expert = hotness.n_expert() as usize;
    let layers = hotness.layers(phases).into_iter();
    let layers: Vec<Vec<u64>> = layers.map(|layer| hotness.counts(layer, phases)).collect();
    let x = |n: usize| 100.0 * n as f64 / n_expert.max(1) as f64;
    let points = |shares: &[f64]| -> Vec<(f64, f64)> {
        let shares = shares.iter().enumerate();
        shares.map(|(n, share)| (x(n), 100.0 * share)).collect()
    };
    let mut lines = vec![
        Line::reference("uniform router", vec![(0.0, 0.0), (100.0, 100.0)]),
        Line::new("all tokens, in-sample", points(&covered(&layers, n_expert))),
    ];
    let fraction = match args.split() {
        SplitChoice::Time(fraction) => fraction,
        SplitChoice::BySequence | SplitChoice::ByLabel => 0.5,
    };
    if let Some(Curve {
        in_sample,
        out_of_sample,
    }) = curves(&counted.survey, n_expert, fraction)
    {
        lines.push(Line::new("training split, in-sample", points(&in_sample)));
        lines.push(Line::strong(
            "held-out split, out-of-sample",
            points(&out_of_sample),
        ));
    }
    Chart {
        title: "Coverage of the hottest experts".into(),
        subtitle: sentences::subtitle(&args.inputs, hotness),
        x: Axis::numbers("hottest experts of each layer (%)", 0.0, 100.0),
        y: Axis::numbers("activations covered (%)", 0.0, 100.0),
        lines,
    }
    .figure()
}

/// Returns the fraction of activations of all layers that the `n` hottest experts of each layer cover, for n from 0 to `n_expert`.
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
