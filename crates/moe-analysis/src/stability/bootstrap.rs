//! How far figures would move if the trace had been another one of its kind.

use std::ops::Range;

use moe_placement::random::SplitMix64;
use moe_trace::LayerId;

use crate::measures::{Spread, TOP_PERCENT, hottest, n_of_percent};
use crate::quantile::quantile;
use crate::stability::HOT_PERCENT;
use crate::survey::Survey;

/// Blocks of tokens that are drawn, at most.
const MAX_BLOCKS: usize = 32;
/// Share of the resamples within an interval.
const LEVEL: f64 = 0.95;

/// A figure with its interval.
#[derive(Debug, Clone, PartialEq)]
pub struct Interval {
    /// What it is.
    pub measure: String,
    /// Of the trace itself, mean of the layers.
    pub value: f64,
    /// 2.5 % of the resamples are below.
    pub low: f64,
    /// 2.5 % of the resamples are above.
    pub high: f64,
}

/// Percentile intervals (95 %) of the means over the layers, from `n` resamples of a generator that `seed` determines: the same
/// seed gives the same intervals.
///
/// Whole blocks of consecutive tokens are drawn with replacement, the same ones in all layers (the block bootstrap of Carlstein 1986), as
/// neighbouring tokens are alike and drawing single ones would give intervals that are too narrow. A resample holds fewer
/// different tokens than the trace, so that figures of concentration lean upwards. The last figure tests what was learned on the first
/// half on resamples of the second.
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

/// A layer's counts in blocks.
struct Blocks {
    /// `[block][n_expert]`
    counts: Vec<Vec<u64>>,
    /// Hot experts of the first half of the blocks.
    learned: Vec<usize>,
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
            learned: hottest(
                &windows.counts(layer, &half),
                n_of_percent(n_expert, HOT_PERCENT),
            ),
        }
    }

    /// Sum of the blocks drawn. A layer with fewer blocks than others takes those in the same place of its own time.
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

/// The figures of [`names`] for the blocks drawn, means over the layers.
fn figures(layers: &[Blocks], draw: &[usize]) -> Vec<f64> {
    let n_block = draw.len();
    let mut sums = vec![0.0; TOP_PERCENT.len() + 4];
    for layer in layers {
        let spread = Spread::of(&layer.sum(draw.iter().copied(), n_block));
        // A draw of the first half's blocks is turned into one of the second's.
        let later = draw.iter().map(|block| n_block / 2 + block / 2);
        let tested = layer.sum(later.map(|block| block.min(n_block - 1)), n_block);
        let hits: u64 = layer.learned.iter().filter_map(|&e| tested.get(e)).sum();
        let held_out = hits as f64 / tested.iter().sum::<u64>().max(1) as f64;
        let rest = [spread.gini, spread.entropy, spread.effective, held_out];
        let figures = spread.share_top.into_iter().chain(rest);
        for (sum, figure) in sums.iter_mut().zip(figures) {
            *sum += figure;
        }
    }
    let n = layers.len() as f64;
    sums.into_iter().map(|sum| sum / n).collect()
}
