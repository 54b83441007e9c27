//! After how many tokens the hot set stops changing.

use crate::measures::{hottest, jaccard, n_of_percent};
use crate::stability::HOT_PERCENT;
use crate::survey::Survey;
use moe_trace::LayerId;

/// The set counts as almost settled while its Jaccard index with the final one is no less.
const ALMOST: f64 = 0.9;

/// When the set of a layer's hottest [`HOT_PERCENT`] % of experts, counted from the first token on, was the final one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settling {
    /// Block number.
    pub layer: LayerId,
    /// Tokens that the layer routed.
    pub rows: u64,
    /// Tokens after which the set never changed again, to whole windows. Equal to `rows` if it changed in the last window.
    pub settled: u64,
    /// Tokens after which its Jaccard index with the final set never fell below 0.9 again.
    pub almost_settled: u64,
}

/// One row for each layer. That a set has settled says no more than that these tokens did not move it: a set that settled
/// late, or not, is not learned.
pub fn settling(survey: &Survey, n_expert: u32) -> Vec<Settling> {
    let layers = survey.layers().into_iter();
    layers
        .map(|layer| of_layer(survey, layer, n_expert))
        .collect()
}

fn of_layer(survey: &Survey, layer: LayerId, n_expert: u32) -> Settling {
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
    // The first window from which on all sets are good.
    let since = |is_good: &dyn Fn(&Vec<usize>) -> bool| {
        let good = sets.iter().rev().take_while(|set| is_good(set)).count();
        windows.rows(layer, &(0..sets.len() - good + 1))
    };
    Settling {
        layer,
        rows: survey.rows(layer),
        settled: since(&|set| set == last),
        almost_settled: since(&|set| jaccard(set, last) >= ALMOST),
    }
}
