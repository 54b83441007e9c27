//! Convergence of the hot set: the number of tokens after which it no longer changes.

use crate::measures::{hottest, jaccard, n_of_percent};
use crate::stability::HOT_PERCENT;
use crate::survey::Survey;
use moe_trace::LayerId;

/// Minimum Jaccard index with the final hot set of an almost converged hot set.
const ALMOST: f64 = 0.9;

/// Convergence of the hot set of a layer: the hottest [`HOT_PERCENT`] % of the experts by all counts since the first token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Convergence {
    /// Block number.
    pub layer: LayerId,
    /// Number of tokens routed in the layer.
    pub tokens: u64,
    /// Tokens after which the hot set never changes again, in units of windows. Equal to `tokens` if it changes in the last
    /// window.
    pub converged: u64,
    /// Tokens after which the Jaccard index with the final hot set is never below 0.9 again.
    pub almost_converged: u64,
}

/// Convergence of each layer. A converged hot set may still change in later tokens. A hot set that converges late, or in the
/// last window, is not reliable.
pub fn convergence(survey: &Survey, n_expert: u32) -> Vec<Convergence> {
    let layers = survey.layers().into_iter();
    layers
        .map(|layer| convergence_of(survey, layer, n_expert))
        .collect()
}

fn convergence_of(survey: &Survey, layer: LayerId, n_expert: u32) -> Convergence {
    let windows = survey.windows();
    let n_hot = n_of_percent(n_expert as usize, HOT_PERCENT);
    let mut counts = Vec::new();
    let sets = (0..windows.len(layer)).map(|window| {
        windows.add_counts(layer, &(window..window + 1), &mut counts);
        let mut set = hottest(&counts, n_hot);
        set.sort_unstable();
        set
    });
    let sets: Vec<Vec<usize>> = sets.collect();
    let empty = Vec::new();
    let last = sets.last().unwrap_or(&empty);
    // Number of tokens up to the first window from which on `is_good` is true for all hot sets.
    let since = |is_good: &dyn Fn(&Vec<usize>) -> bool| {
        let good = sets.iter().rev().take_while(|set| is_good(set)).count();
        windows.routed_tokens(layer, &(0..sets.len() - good + 1))
    };
    Convergence {
        layer,
        tokens: survey.routed_tokens(layer),
        converged: since(&|set| set == last),
        almost_converged: since(&|set| jaccard(set, last) >= ALMOST),
    }
}
