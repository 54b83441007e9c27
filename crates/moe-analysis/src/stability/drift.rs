//! Drift: how the distribution of selections changes over time.

use crate::measures::{expected_total_variation, hottest, jaccard, n_of_percent, total_variation};
use crate::stability::HOT_PERCENT;
use crate::survey::Survey;
use moe_trace::LayerId;

/// Number of time spans between which drift is measured.
pub const N_SPANS: usize = 8;

/// Drift between two spans of a layer's tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Drift {
    /// Block number; `None` for the mean of the layers.
    pub layer: Option<LayerId>,
    /// Index of the earlier span, 0 to [`N_SPANS`] - 2.
    pub from: usize,
    /// Index of the later span.
    pub to: usize,
    /// Tokens in the earlier span.
    pub tokens: u64,
    /// Total variation distance of the expert distributions ([`total_variation`]).
    pub total_variation: f64,
    /// Expected total variation without drift ([`expected_total_variation`]).
    pub noise: f64,
    /// Jaccard index of the hottest [`HOT_PERCENT`] % of the experts.
    pub jaccard: f64,
}

/// Drift from each span to the next and from the first to the last: for each layer, then the means over the layers.
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
            tokens: of_pair.iter().map(|row| row.tokens).max().unwrap_or(0),
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
        (windows.routed_tokens(layer, span), counts, hot)
    });
    let spans: Vec<_> = spans.collect();
    let last = spans.len() - 1;
    let mut pairs: Vec<(usize, usize)> = (0..last).map(|from| (from, from + 1)).collect();
    if last > 1 {
        pairs.push((0, last));
    }
    let drifts = pairs.into_iter().filter_map(|(from, to)| {
        let (left_tokens, left, left_hot) = &spans[from];
        let (right_tokens, right, right_hot) = &spans[to];
        Some(Drift {
            layer: Some(layer),
            from,
            to,
            tokens: *left_tokens,
            total_variation: total_variation(left, right)?,
            noise: expected_total_variation((left, *left_tokens), (right, *right_tokens))?,
            jaccard: jaccard(left_hot, right_hot),
        })
    });
    drifts.collect()
}
