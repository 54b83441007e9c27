//! One verdict on a trace: how far to trust what it says of hot experts.

use crate::stability::split::{Split, split_by_time};
use crate::stability::{HOT_PERCENT, settling};
use crate::survey::Survey;

/// Choices for each expert, on average, that each half of a trace should have: below, chance decides which experts look hot
/// (the rule of five of the chi-square test, Cochran 1954).
const ENOUGH: f64 = 5.0;
/// A hot set that covers less than this beyond an even router's share is not worth a cache.
const MIN_GAIN: f64 = 0.05;
/// Part of the gain over an even router that must be left in the second half.
const HOLDS: f64 = 0.9;
/// Below this, what was learned is mostly lost.
const HOLDS_IN_PART: f64 = 0.6;

/// How far to trust a trace. The bounds are choices of this program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stability {
    /// Counts without order tell nothing of time.
    Unordered,
    /// Fewer than five choices an expert in one of the halves.
    TooShort,
    /// The hottest quarter covers hardly more than a quarter, also in the half that it was learned on.
    Even,
    /// Nine tenths of the gain over an even router are left in the second half.
    Holds,
    /// Six tenths are.
    HoldsInPart,
    /// Less.
    DoesNotHold,
}

/// The verdict and what it rests upon.
#[derive(Debug, Clone, PartialEq)]
pub struct Trust {
    /// The verdict.
    pub verdict: Stability,
    /// Tokens of the layer that routed most.
    pub rows: u64,
    /// Learned on the first half, tested on the second.
    pub split: Option<Split>,
    /// Layers whose hot set still changed in the last eighth of the tokens.
    pub unsettled: usize,
}

/// Judges a survey of a model with `n_expert` experts in a layer.
pub fn trust(survey: &Survey, n_expert: u32) -> Trust {
    let is_late = |settled: u64, rows: u64| settled > rows - rows / 8;
    let unsettled = settling(survey, n_expert).into_iter();
    let split = split_by_time(survey, n_expert, 0.5);
    Trust {
        verdict: verdict(survey, n_expert, split.as_ref()),
        rows: survey.tokens(),
        split,
        unsettled: unsettled
            .filter(|layer| is_late(layer.settled, layer.rows))
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
    let choices = survey.layers().into_iter().map(|layer| {
        let windows = survey.windows();
        let counts = windows.counts(layer, &(0..windows.len(layer)));
        counts.iter().sum::<u64>() as f64 / survey.rows(layer).max(1) as f64
    });
    let n_expert_used = choices.fold(0.0, f64::max);
    let rows = split.rows_learned.min(split.rows_tested) as f64;
    if rows * n_expert_used / f64::from(n_expert.max(1)) < ENOUGH {
        return Stability::TooShort;
    }
    let gain = hot.in_sample - hot.uniform;
    if gain < MIN_GAIN {
        return Stability::Even;
    }
    match (hot.out_of_sample - hot.uniform) / gain {
        kept if kept >= HOLDS => Stability::Holds,
        kept if kept >= HOLDS_IN_PART => Stability::HoldsInPart,
        _ => Stability::DoesNotHold,
    }
}
