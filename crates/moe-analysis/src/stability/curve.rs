//! Coverage curves: hit rate as a function of the number of cached experts.

use crate::measures::hottest;
use crate::survey::Survey;

/// Fraction of the selections that the `n` hottest experts of each layer cover, for n = 0 to `n_expert` (`[n_expert + 1]`).
#[derive(Debug, Clone, PartialEq)]
pub struct Curve {
    /// On the training split.
    pub in_sample: Vec<f64>,
    /// On the held-out split.
    pub out_of_sample: Vec<f64>,
}

/// Coverage curves for a split of each layer's tokens at `fraction`, like [`super::split_by_time`]. The hottest experts are
/// those of the training split; experts without selections there come last, sorted by id. `None` if a split is empty.
pub fn curves(survey: &Survey, n_expert: usize, fraction: f64) -> Option<Curve> {
    let mut sums = [vec![0.0; n_expert + 1], vec![0.0; n_expert + 1]];
    for layer in survey.layers() {
        let Some([training, held_out]) = super::split::halves(survey, layer, fraction) else {
            continue;
        };
        let mut order = hottest(&training.0, n_expert);
        order.extend((0..n_expert).filter(|&e| training.0.get(e).is_none_or(|&count| count == 0)));
        for (sums, counts) in sums.iter_mut().zip([&training.0, &held_out.0]) {
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
