//! Coverage by sets of every size.

use crate::measures::hottest;
use crate::survey::Survey;

/// Share of the choices that the `n` hottest experts of each layer cover, by n from 0 to all.
#[derive(Debug, Clone, PartialEq)]
pub struct Curve {
    /// Of the tokens learned on.
    pub in_sample: Vec<f64>,
    /// Of the tokens after them.
    pub out_of_sample: Vec<f64>,
}

/// Learns on the first `fraction` of each layer's tokens, as [`super::split_by_time`]. Experts that were not chosen there are last, in the order
/// of their ids. `None` where nothing is left to test on.
pub fn curves(survey: &Survey, n_expert: usize, fraction: f64) -> Option<Curve> {
    let mut sums = [vec![0.0; n_expert + 1], vec![0.0; n_expert + 1]];
    for layer in survey.layers() {
        let Some([learned, tested]) = super::split::halves(survey, layer, fraction) else {
            continue;
        };
        let mut order = hottest(&learned.0, n_expert);
        order.extend((0..n_expert).filter(|&e| learned.0.get(e).is_none_or(|&count| count == 0)));
        for (sums, counts) in sums.iter_mut().zip([&learned.0, &tested.0]) {
            for (sum, &expert) in sums[1..].iter_mut().zip(&order) {
                *sum += counts.get(expert).map_or(0.0, |&count| count as f64);
            }
        }
    }
    for sums in &mut sums {
        for n in 1..sums.len() {
            sums[n] += sums[n - 1];
        }
        let total = sums.last().copied().filter(|&total| total > 0.0)?;
        sums.iter_mut().for_each(|sum| *sum /= total);
    }
    let [in_sample, out_of_sample] = sums;
    Some(Curve {
        in_sample,
        out_of_sample,
    })
}
