//! Routers that select experts with known, non-uniform frequencies.
//!
//! The score of an expert is a bonus plus noise. The bonus is the same for all tokens: in all embeddings, every eighth block is
//! lifted (has a positive mean), and the expert's row of the router weights these blocks. The noise differs between tokens and
//! has standard deviation 1. An expert is selected approximately if its score is above a threshold. Its bonus is therefore
//! `Φ⁻¹(p)` for the target fraction `p` of tokens, where `Φ` is the normal distribution function.

use moe_gguf::GgmlType;

use super::blocks::{LIFT_EVERY, lifted_moments};
use super::random::{SplitMix64, uniform};

/// Maximum fraction of tokens that select an expert.
const MAX_SHARE: f64 = 0.98;

/// Generates the rows of all routers of a model.
pub(super) struct Router {
    n_embd: usize,
    /// Block size of the embeddings in elements.
    block: usize,
    /// Bonuses by rank, hottest first.
    bonuses: Vec<f64>,
    /// Weight of each lifted element for a bonus of 1.
    per_bonus: f64,
    /// Standard deviation of the noise.
    noise: f64,
}

impl Router {
    /// Returns a generator of routers for embeddings of type `embedding`, which must be a type that can be lifted.
    pub(super) fn new(
        embedding: GgmlType,
        n_embd: usize,
        n_expert: usize,
        n_expert_used: usize,
        zipf: f64,
    ) -> Router {
        let (mean, std) = lifted_moments(embedding).unwrap_or((0.0, 1.0));
        let block = embedding.block_size() as usize;
        let lifted = (0..n_embd).filter(|i| is_lifted(*i, block)).count() as f64;
        let plain = n_embd as f64 - lifted;
        // Mean square of an element. The router's input is normalized by its root.
        let square = (plain + lifted * (mean * mean + std * std)) / n_embd as f64;
        let noise_square = (plain + lifted * std * std) / square;
        Router {
            n_embd,
            block,
            bonuses: bonuses(n_expert, n_expert_used, zipf),
            per_bonus: square.sqrt() / (lifted * mean.max(f64::MIN_POSITIVE)),
            noise: 1.0 / noise_square.sqrt(),
        }
    }

    /// Appends the row of the expert with this rank, as F32.
    pub(super) fn row(&self, random: &mut SplitMix64, rank: usize, out: &mut Vec<u8>) {
        let mut row: Vec<f64> = (0..self.n_embd)
            .map(|_| self.noise * uniform(random))
            .collect();
        // Subtract the mean of the noise over lifted elements, which would be an additional bonus.
        let lifted = || (0..self.n_embd).filter(|&i| is_lifted(i, self.block));
        let mean = lifted().map(|i| row[i]).sum::<f64>() / lifted().count().max(1) as f64;
        let bonus = self.bonuses.get(rank).copied().unwrap_or(0.0) * self.per_bonus;
        lifted().for_each(|i| row[i] += bonus - mean);
        out.extend(row.iter().flat_map(|&w| (w as f32).to_le_bytes()));
    }
}

/// Returns the rank of each expert of a layer, a random permutation.
pub(super) fn ranks(random: &mut SplitMix64, n_expert: usize) -> Vec<usize> {
    let mut ranks: Vec<usize> = (0..n_expert).collect();
    for i in (1..n_expert).rev() {
        ranks.swap(i, (random.next_u64() % (i as u64 + 1)) as usize);
    }
    ranks
}

fn is_lifted(element: usize, block: usize) -> bool {
    (element / block).is_multiple_of(LIFT_EVERY)
}

fn bonuses(n_expert: usize, n_expert_used: usize, zipf: f64) -> Vec<f64> {
    if n_expert_used >= n_expert || zipf == 0.0 {
        return vec![0.0; n_expert];
    }
    shares(n_expert, n_expert_used, zipf)
        .into_iter()
        .map(inverse_normal)
        .collect()
}

/// Returns the fraction of tokens that select each expert: `min(MAX_SHARE, c / rank^zipf)` (Zipf's law).
///
/// `c` is determined so that the fractions add up to `n_expert_used`.
pub(super) fn shares(n_expert: usize, n_expert_used: usize, zipf: f64) -> Vec<f64> {
    let share = |c: f64, rank: usize| (c * (rank as f64).powf(-zipf)).min(MAX_SHARE);
    let sum = |c: f64| (1..=n_expert).map(|rank| share(c, rank)).sum::<f64>();
    let target = n_expert_used as f64;
    let mut high = 1.0;
    while sum(high) < target && high < 1e300 {
        high *= 2.0;
    }
    let c = bisect(0.0, high, |c| sum(c) < target);
    (1..=n_expert).map(|rank| share(c, rank)).collect()
}

/// Returns the quantile `Φ⁻¹(p)` of the standard normal distribution.
fn inverse_normal(p: f64) -> f64 {
    bisect(-8.0, 8.0, |x| normal(x) < p)
}

/// Returns the distribution function `Φ(x)` of the standard normal distribution.
///
/// Power series of Marsaglia, "Evaluating the Normal Distribution" (2004): `1/2 + φ(x) (x + x³/3 + x⁵/(3·5) + …)`.
fn normal(x: f64) -> f64 {
    let (mut term, mut sum, mut odd) = (x, x, 1.0);
    while term.abs() > 1e-17 {
        odd += 2.0;
        term *= x * x / odd;
        sum += term;
    }
    0.5 + sum * (-0.5 * x * x).exp() / (2.0 * std::f64::consts::PI).sqrt()
}

/// Returns the point between `low` and `high` at which `is_below` changes from true to false.
fn bisect(mut low: f64, mut high: f64, is_below: impl Fn(f64) -> bool) -> f64 {
    for _ in 0..100 {
        let middle = 0.5 * (low + high);
        if is_below(middle) {
            low = middle;
        } else {
            high = middle;
        }
    }
    0.5 * (low + high)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn normal_distribution_has_known_values() {
        assert!((normal(0.0) - 0.5).abs() < 1e-15);
        assert!((normal(1.959_963_985) - 0.975).abs() < 1e-9);
        assert!((inverse_normal(0.001) + 3.090_232_306).abs() < 1e-8);
    }

    #[test]
    fn shares_follow_zipfs_law_and_add_up() {
        let shares = shares(128, 8, 0.5);
        assert!((shares.iter().sum::<f64>() - 8.0).abs() < 1e-9);
        assert!((shares[0] / shares[15] - 4.0).abs() < 1e-9);
        let steep = super::shares(128, 8, 2.0);
        assert!((steep.iter().sum::<f64>() - 8.0).abs() < 1e-9);
        assert_eq!(steep[0], MAX_SHARE);
        let uniform = super::shares(64, 8, 0.0);
        assert!(uniform.iter().all(|&share| (share - 0.125).abs() < 1e-12));
    }

    #[test]
    fn ranks_are_a_permutation() {
        let mut ranks = ranks(&mut SplitMix64::new(7), 100);
        assert_ne!(ranks[..5], [0, 1, 2, 3, 4]);
        ranks.sort_unstable();
        assert!(ranks.into_iter().eq(0..100));
    }
}
