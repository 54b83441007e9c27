//! Distances between two distributions or sets of selected experts.

use std::collections::BTreeSet;

/// Total variation distance between the distributions of two counts: ½ Σₑ |pₑ − qₑ|. 0 means equal distributions, 1 means
/// that they have no expert in common. It is the fraction of selections that would have to change.
///
/// Source: Levin and Peres, *Markov Chains and Mixing Times*, section 4.1. Returns `None` if either sum is 0. A shorter
/// slice is extended with zeros.
pub fn total_variation(left: &[u64], right: &[u64]) -> Option<f64> {
    let sum = |counts: &[u64]| counts.iter().map(|&count| count as f64).sum::<f64>();
    let (total_left, total_right) = (sum(left), sum(right));
    if total_left == 0.0 || total_right == 0.0 {
        return None;
    }
    let share = |counts: &[u64], expert: usize, total: f64| {
        counts.get(expert).map_or(0.0, |&count| count as f64) / total
    };
    let experts = 0..left.len().max(right.len());
    let moved = experts.map(|e| (share(left, e, total_left) - share(right, e, total_right)).abs());
    Some(moved.sum::<f64>() / 2.0)
}

/// Expected [`total_variation`] of two windows without drift, due to sampling alone.
///
/// Each window is a pair of counts (`[n_expert]`) and number of tokens. qₑ is the pooled count of expert e over the pooled number of
/// tokens, k the number of experts per token. Then pₑ in a window of n tokens has the variance qₑ (1 − qₑ) / (n k²), and the
/// result is ½ √(2/π) Σₑ √(qₑ (1 − qₑ) (1/n₁ + 1/n₂)) / k, since E|X| = σ √(2/π) for a normal X. Correlated tokens increase
/// the real value. Returns `None` if a window has no tokens.
pub fn expected_total_variation(left: (&[u64], u64), right: (&[u64], u64)) -> Option<f64> {
    let ((left, tokens_left), (right, tokens_right)) = (left, right);
    if tokens_left == 0 || tokens_right == 0 {
        return None;
    }
    let tokens = (tokens_left + tokens_right) as f64;
    let count = |counts: &[u64], expert: usize| counts.get(expert).map_or(0.0, |&c| c as f64);
    let experts = 0..left.len().max(right.len());
    let pooled: Vec<f64> = experts.map(|e| count(left, e) + count(right, e)).collect();
    let k = pooled.iter().sum::<f64>() / tokens;
    let per_token = 1.0 / tokens_left as f64 + 1.0 / tokens_right as f64;
    let deviations = pooled.iter().map(|count| {
        let q = (count / tokens).min(1.0);
        (q * (1.0 - q) * per_token).sqrt() / k
    });
    Some(deviations.sum::<f64>() * (2.0 / std::f64::consts::PI).sqrt() / 2.0)
}

/// Jaccard index of two sets of experts, |A ∩ B| / |A ∪ B|: 1 means equal sets. It is 1 for two empty sets.
///
/// Source: Jaccard (1901).
pub fn jaccard(left: &[usize], right: &[usize]) -> f64 {
    let left: BTreeSet<_> = left.iter().collect();
    let right: BTreeSet<_> = right.iter().collect();
    match left.union(&right).count() {
        0 => 1.0,
        union => left.intersection(&right).count() as f64 / union as f64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn total_variation_matches_manual_result() {
        // Distributions ½ ½ 0 and ¼ ¼ ½.
        assert_eq!(total_variation(&[2, 2], &[1, 1, 2]), Some(0.5));
        assert_eq!(total_variation(&[4, 4], &[1, 1]), Some(0.0));
        assert_eq!(total_variation(&[4, 0], &[0, 1]), Some(1.0));
        assert_eq!(total_variation(&[0, 0], &[0, 1]), None);
    }

    /// Two experts, one per token, equally likely: pₑ of both windows differs with σ = √(¼ (1/n + 1/n)).
    #[test]
    fn expected_total_variation_matches_coin_toss() {
        let noise = expected_total_variation((&[50, 50], 100), (&[50, 50], 100)).unwrap();
        let expected = 0.005f64.sqrt() * (2.0 / std::f64::consts::PI).sqrt();
        assert!((noise - expected).abs() < 1e-12, "{noise} {expected}");
        // An expert that every token selects has no variance.
        let noise = expected_total_variation((&[100], 100), (&[100], 100)).unwrap();
        assert_eq!(noise, 0.0);
        assert_eq!(expected_total_variation((&[1], 1), (&[], 0)), None);
    }

    #[test]
    fn jaccard_matches_manual_result() {
        assert_eq!(jaccard(&[1, 2, 3], &[3, 4, 2]), 0.5);
        assert_eq!(jaccard(&[], &[]), 1.0);
        assert_eq!(jaccard(&[1], &[]), 0.0);
    }
}
