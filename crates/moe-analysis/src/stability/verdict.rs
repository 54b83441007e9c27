//! A verdict on the stability of hotness in a trace.

use crate::stability::split::{Split, split_by_time};
use crate::stability::{HOT_PERCENT, convergence};
use crate::survey::Survey;

/// Minimum mean number of selections per expert in each half of the trace. With fewer, chance determines which experts look
/// hot.
///
/// Source: the rule of five for chi-square tests (Cochran 1954).
pub const MIN_SELECTIONS_PER_EXPERT: f64 = 5.0;
/// Minimum in-sample gain in coverage over a uniform router for which a cache is useful.
const MIN_GAIN: f64 = 0.05;
/// Minimum fraction of the gain that remains out of sample for [`Stability::Generalizes`].
const GENERALIZES: f64 = 0.9;
/// Minimum fraction of the gain that remains out of sample for [`Stability::GeneralizesInPart`].
const GENERALIZES_IN_PART: f64 = 0.6;

/// Stability of hotness. The hot set is the hottest [`HOT_PERCENT`] % of each layer's experts. The training split is the
/// first half of the trace, the held-out split the second half. The thresholds are heuristics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stability {
    /// The input contains counts without order.
    Unordered,
    /// A split has fewer than [`MIN_SELECTIONS_PER_EXPERT`] selections per expert on average.
    TooShort,
    /// Uniform router: the in-sample gain over a uniform router is below 0.05.
    Uniform,
    /// At least 0.9 of the gain over a uniform router remains on the held-out split.
    Generalizes,
    /// At least 0.6 of the gain remains.
    GeneralizesInPart,
    /// Less than 0.6 of the gain remains.
    DoesNotGeneralize,
}

/// A verdict and its basis.
#[derive(Debug, Clone, PartialEq)]
pub struct Assessment {
    /// The verdict.
    pub verdict: Stability,
    /// Number of tokens of the layer with the most tokens.
    pub tokens: u64,
    /// Coverage of the first half's hot set on the second half.
    pub split: Option<Split>,
    /// Number of layers whose hot set changes in the last eighth of the tokens.
    pub unconverged: usize,
}

/// Evaluates the stability of a survey. `n_expert` is the number of experts per layer.
pub fn assess(survey: &Survey, n_expert: u32) -> Assessment {
    let is_late = |converged: u64, tokens: u64| converged > tokens - tokens / 8;
    let unconverged = convergence(survey, n_expert).into_iter();
    let split = split_by_time(survey, n_expert, 0.5);
    Assessment {
        verdict: verdict(survey, n_expert, split.as_ref()),
        tokens: survey.tokens(),
        split,
        unconverged: unconverged
            .filter(|layer| is_late(layer.converged, layer.tokens))
            .count(),
    }
}

fn verdict(survey: &Survey, n_expert: u32, split: Option<&Split>) -> Stability {
    if !survey.is_ordered() {
        return Stability::Unordered;
    }
    let Some(split) = split else {
        return Stability::TooShort;
    };
    let Some(hot) = split.of_percent(HOT_PERCENT) else {
        return Stability::TooShort;
    };
    let experts_per_token = survey.layers().into_iter().map(|layer| {
        let windows = survey.windows();
        let counts = windows.counts(layer, &(0..windows.len(layer)));
        counts.iter().sum::<u64>() as f64 / survey.routed_tokens(layer).max(1) as f64
    });
    let n_expert_used = experts_per_token.fold(0.0, f64::max);
    let tokens = split.train_tokens.min(split.held_out_tokens) as f64;
    if tokens * n_expert_used / f64::from(n_expert.max(1)) < MIN_SELECTIONS_PER_EXPERT {
        return Stability::TooShort;
    }
    let gain = hot.in_sample - hot.uniform;
    if gain < MIN_GAIN {
        return Stability::Uniform;
    }
    match (hot.out_of_sample - hot.uniform) / gain {
        kept if kept >= GENERALIZES => Stability::Generalizes,
        kept if kept >= GENERALIZES_IN_PART => Stability::GeneralizesInPart,
        _ => Stability::DoesNotGeneralize,
    }
}
