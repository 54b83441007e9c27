//! Confidence intervals by block bootstrap.

use std::ops::Range;

use moe_placement::random::SplitMix64;
use moe_trace::LayerId;

use crate::measures::{LoadBalance, TOP_PERCENT, hottest, n_of_percent};
use crate::quantile::quantile;
use crate::stability::HOT_PERCENT;
use crate::survey::Survey;

/// Maximum number of blocks of tokens.
const MAX_BLOCKS: usize = 32;
/// Confidence level.
const LEVEL: f64 = 0.95;

/// A measure with its confidence interval.
#[derive(Debug, Clone, PartialEq)]
pub struct Interval {
    /// Name of the measure.
    pub measure: String,
    /// Value for the trace: the mean over the layers.
    pub value: f64,
    /// Lower end of the 95 % interval: 2.5 % of the resamples are below.
    pub low: f64,
    /// Upper end of the 95 % interval: 2.5 % of the resamples are above.
    pub high: f64,
}

/// Percentile bootstrap intervals (95 %) of measures, averaged over the layers. `n` is the number of resamples. The same
/// `seed` yields the same intervals. Returns no intervals for fewer than two blocks or `n` = 0.
///
/// A resample draws blocks of consecutive tokens with replacement, the same blocks in all layers (block bootstrap, Carlstein
/// 1986). Drawing single tokens would yield intervals that are too narrow, because consecutive tokens are correlated. A
/// resample has fewer distinct tokens than the trace, so measures of concentration are biased upward.
///
/// The measure `held_out` is the hit rate of the hottest experts of the first half on resampled blocks of the second half.
pub fn bootstrap(survey: &Survey, n_expert: u32, n: usize, seed: u64) -> Vec<Interval> {
    let layers = survey.layers();
    let layers = layers
        .iter()
        .map(|&layer| Blocks::new(survey, layer, n_expert));
    let layers: Vec<Blocks> = layers.collect();
    let n_block = layers
        .iter()
        .map(|layer| layer.counts.len())
        .max()
        .unwrap_or(0);
    if n_block < 2 || n == 0 {
        return Vec::new();
    }
    let mut random = SplitMix64::new(seed);
    let all: Vec<usize> = (0..n_block).collect();
    let value = figures(&layers, &all);
    let resamples = (0..n).map(|_| {
        let draw: Vec<usize> = all.iter().map(|_| random.below(n_block)).collect();
        figures(&layers, &draw)
    });
    let resamples: Vec<Vec<f64>> = resamples.collect();
    let names = names().into_iter().zip(value).enumerate();
    let intervals = names.map(|(figure, (measure, value))| {
        let mut values: Vec<f64> = resamples.iter().map(|all| all[figure]).collect();
        values.sort_unstable_by(f64::total_cmp);
        Interval {
            measure,
            value,
            low: quantile(&values, (1.0 - LEVEL) / 2.0),
            high: quantile(&values, (1.0 + LEVEL) / 2.0),
        }
    });
    intervals.collect()
}

/// Counts of a layer by block.
struct Blocks {
    /// `[block][n_expert]`: counts.
    counts: Vec<Vec<u64>>,
    /// Hottest experts of the first half of the blocks (training split).
    hot_set: Vec<usize>,
}

impl Blocks {
    fn new(survey: &Survey, layer: LayerId, n_expert: u32) -> Blocks {
        let windows = survey.windows();
        let n_expert = n_expert as usize;
        let counts = |span: &Range<usize>| {
            let mut counts = windows.counts(layer, span);
            counts.resize(n_expert.max(counts.len()), 0);
            counts
        };
        let spans = windows.spans(layer, MAX_BLOCKS);
        let half = 0..spans[spans.len() / 2].start;
        Blocks {
            counts: spans.iter().map(counts).collect(),
            hot_set: hottest(
                &windows.counts(layer, &half),
                n_of_percent(n_expert, HOT_PERCENT),
            ),
        }
    }

    /// Sum of the drawn blocks. In a layer with fewer than `n_block` blocks, each block maps to the block at the same
    /// relative position.
    fn sum(&self, draw: impl Iterator<Item = usize>, n_block: usize) -> Vec<u64> {
        let mut sums = vec![0; self.counts.iter().map(Vec::len).max().unwrap_or(0)];
        for block in draw {
            let own = block * self.counts.len() / n_block;
            for (sum, count) in sums.iter_mut().zip(&self.counts[own]) {
                *sum += count;
            }
        }
        sums
    }
}

fn names() -> Vec<String> {
    let shares = TOP_PERCENT.map(|percent| format!("top_{percent}"));
    let others = ["gini", "entropy", "effective", "held_out"].map(String::from);
    shares.into_iter().chain(others).collect()
}

/// The measures of [`names`] for the drawn blocks, averaged over the layers.
fn figures(layers: &[Blocks], draw: &[usize]) -> Vec<f64> {
    let n_block = draw.len();
    let mut sums = vec![0.0; TOP_PERCENT.len() + 4];
    for layer in layers {
        let load_balance = LoadBalance::of(&layer.sum(draw.iter().copied(), n_block));
        // Maps the drawn blocks to blocks of the second half (held-out split).
        let later = draw.iter().map(|block| n_block / 2 + block / 2);
        let held_out = layer.sum(later.map(|block| block.min(n_block - 1)), n_block);
        let hits: u64 = layer.hot_set.iter().filter_map(|&e| held_out.get(e)).sum();
        let held_out = hits as f64 / held_out.iter().sum::<u64>().max(1) as f64;
        let rest = [
            load_balance.gini,
            load_balance.entropy,
            load_balance.effective,
            held_out,
        ];
        let figures = load_balance.share_top.into_iter().chain(rest);
        for (sum, figure) in sums.iter_mut().zip(figures) {
            *sum += figure;
        }
    }
    let n = layers.len() as f64;
    sums.into_iter().map(|sum| sum / n).collect()
}
