//! How hotness moves with time.

use crate::measures::{hottest, jaccard, n_of_percent, total_variation, total_variation_of_noise};
use crate::stability::HOT_PERCENT;
use crate::survey::Survey;
use moe_trace::LayerId;

/// Spans of time that drift is told between.
pub const N_SPANS: usize = 8;

/// From one span of a layer's tokens to a later one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Drift {
    /// Block number; `None` = mean of the layers.
    pub layer: Option<LayerId>,
    /// The earlier of [`N_SPANS`] spans, from 0.
    pub from: usize,
    /// The later.
    pub to: usize,
    /// Tokens in the earlier span.
    pub rows: u64,
    /// Total variation between the shares of the experts ([`total_variation`]).
    pub total_variation: f64,
    /// What it would be by chance, without drift ([`total_variation_of_noise`]).
    pub noise: f64,
    /// Jaccard index of the sets of the hottest [`HOT_PERCENT`] % of the experts.
    pub jaccard: f64,
}

/// Drift from each span to the next, and from the first to the last, for each layer; then the means of the layers.
pub fn drift(survey: &Survey, n_expert: u32) -> Vec<Drift> {
    let mut rows = Vec::new();
    for layer in survey.layers() {
        rows.extend(drift_of_layer(survey, layer, n_expert as usize));
    }
    let mut pairs: Vec<(usize, usize)> = rows.iter().map(|row| (row.from, row.to)).collect();
    pairs.sort_unstable();
    pairs.dedup();
    let means = pairs.into_iter().map(|(from, to)| {
        let of_pair = rows.iter().filter(|row| (row.from, row.to) == (from, to));
        let of_pair: Vec<&Drift> = of_pair.collect();
        let mean = |value: fn(&Drift) -> f64| {
            of_pair.iter().map(|row| value(row)).sum::<f64>() / of_pair.len() as f64
        };
        Drift {
            layer: None,
            from,
            to,
            rows: of_pair.iter().map(|row| row.rows).max().unwrap_or(0),
            total_variation: mean(|row| row.total_variation),
            noise: mean(|row| row.noise),
            jaccard: mean(|row| row.jaccard),
        }
    });
    let means: Vec<Drift> = means.collect();
    rows.extend(means);
    rows
}

fn drift_of_layer(survey: &Survey, layer: LayerId, n_expert: usize) -> Vec<Drift> {
    let windows = survey.windows();
    let spans = windows.spans(layer, N_SPANS);
    let spans = spans.iter().map(|span| {
        let counts = windows.counts(layer, span);
        let hot = hottest(&counts, n_of_percent(n_expert, HOT_PERCENT));
        (windows.rows(layer, span), counts, hot)
    });
    let spans: Vec<_> = spans.collect();
    let last = spans.len() - 1;
    let mut pairs: Vec<(usize, usize)> = (0..last).map(|from| (from, from + 1)).collect();
    if last > 1 {
        pairs.push((0, last));
    }
    let drifts = pairs.into_iter().filter_map(|(from, to)| {
        let (left_rows, left, left_hot) = &spans[from];
        let (right_rows, right, right_hot) = &spans[to];
        Some(Drift {
            layer: Some(layer),
            from,
            to,
            rows: *left_rows,
            total_variation: total_variation(left, right)?,
            noise: total_variation_of_noise((left, *left_rows), (right, *right_rows))?,
            jaccard: jaccard(left_hot, right_hot),
        })
    });
    drifts.collect()
}
