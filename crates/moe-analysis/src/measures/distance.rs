//! How far apart two sets of choices are.

use std::collections::BTreeSet;

/// Total variation between the shares of two counts, ½ Σ |pₑ − qₑ|: 0 is the same, 1 has no expert in common. It is the share
/// of the choices that would have to move (Levin, Peres, *Markov Chains and Mixing Times*, 4.1).
///
/// `None` where one of them has no choice. Counts may differ in length: what is missing is 0.
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

/// What [`total_variation`] of two windows would be about if nothing drifted and each token chose anew: sampling alone.
///
/// An expert is in a token's choice with probability qₑ (its count over `rows` in both windows together), so its share in a
/// window of n rows has variance qₑ (1 − qₑ) / (n k²); E|X| = σ √(2/π) for a normal X. Neighbouring tokens that are alike
/// make the real noise larger.
pub fn total_variation_of_noise(left: (&[u64], u64), right: (&[u64], u64)) -> Option<f64> {
    let ((left, rows_left), (right, rows_right)) = (left, right);
    if rows_left == 0 || rows_right == 0 {
        return None;
    }
    let rows = (rows_left + rows_right) as f64;
    let count = |counts: &[u64], expert: usize| counts.get(expert).map_or(0.0, |&c| c as f64);
    let experts = 0..left.len().max(right.len());
    let pooled: Vec<f64> = experts.map(|e| count(left, e) + count(right, e)).collect();
    let k = pooled.iter().sum::<f64>() / rows;
    let per_row = 1.0 / rows_left as f64 + 1.0 / rows_right as f64;
    let deviations = pooled.iter().map(|count| {
        let q = (count / rows).min(1.0);
        (q * (1.0 - q) * per_row).sqrt() / k
    });
    Some(deviations.sum::<f64>() * (2.0 / std::f64::consts::PI).sqrt() / 2.0)
}

/// Jaccard index of two sets of experts, |A ∩ B| / |A ∪ B|: 1 is the same set (Jaccard 1901). Two empty sets are the same.
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
    fn total_variation_by_hand() {
        // Shares ½ ½ 0 against ¼ ¼ ½.
        assert_eq!(total_variation(&[2, 2], &[1, 1, 2]), Some(0.5));
        assert_eq!(total_variation(&[4, 4], &[1, 1]), Some(0.0));
        assert_eq!(total_variation(&[4, 0], &[0, 1]), Some(1.0));
        assert_eq!(total_variation(&[0, 0], &[0, 1]), None);
    }

    /// Two experts, one a token, even: a share has σ = √(¼ (1/n + 1/n)).
    #[test]
    fn noise_of_a_coin() {
        let noise = total_variation_of_noise((&[50, 50], 100), (&[50, 50], 100)).unwrap();
        let expected = 0.005f64.sqrt() * (2.0 / std::f64::consts::PI).sqrt();
        assert!((noise - expected).abs() < 1e-12, "{noise} {expected}");
        // An expert that is always chosen adds none.
        let noise = total_variation_of_noise((&[100], 100), (&[100], 100)).unwrap();
        assert_eq!(noise, 0.0);
        assert_eq!(total_variation_of_noise((&[1], 1), (&[], 0)), None);
    }

    #[test]
    fn jaccard_by_hand() {
        assert_eq!(jaccard(&[1, 2, 3], &[3, 4, 2]), 0.5);
        assert_eq!(jaccard(&[], &[]), 1.0);
        assert_eq!(jaccard(&[1], &[]), 0.0);
    }
}
