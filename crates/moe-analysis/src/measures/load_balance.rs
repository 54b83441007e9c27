//! Load balance: how evenly selections are distributed over experts.

use std::cmp::Reverse;

/// Percentages of experts for which [`LoadBalance::share_top`] contains the fraction of selections.
pub const TOP_PERCENT: [usize; 5] = [1, 5, 10, 25, 50];

/// Load balance of counts over the experts of a layer, or over all (layer, expert) pairs of a model.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct LoadBalance {
    /// Number of experts N, including experts without selections.
    pub n_expert: usize,
    /// Number of selections: the sum of the counts.
    pub n_selections: u64,
    /// Number of experts with at least one selection.
    pub n_active: usize,
    /// Fraction of the selections by the hottest 1, 5, 10, 25 and 50 % of the experts ([`TOP_PERCENT`], rounded up to
    /// integer numbers of experts). These are points of the Lorenz curve.
    pub share_top: [f64; TOP_PERCENT.len()],
    /// Gini coefficient: Σᵢ (2i − N − 1) xᵢ / (N Σ x) for counts x sorted in ascending order and i from 1. 0 means uniform;
    /// 1 − 1/N means that one expert has all selections.
    ///
    /// Source: Gini (1912); finite-population form of Sen, *On Economic Inequality* (1973).
    pub gini: f64,
    /// Normalized Shannon entropy H / ln N of the distribution: 1 means uniform, 0 means that one expert has all selections.
    ///
    /// Source: Shannon (1948); proposed as a router metric in <https://github.com/huggingface/trl/issues/4611>.
    pub entropy: f64,
    /// Maximum count over mean count: 1 means uniform, N means that one expert has all selections. Expert-parallel load
    /// balancers such as DeepSeek's EPLB minimize this ratio for devices.
    pub max_over_mean: f64,
    /// Effective number of experts exp(H): the number of uniformly used experts with the same entropy. Hill number of order
    /// 1.
    ///
    /// Source: Jost, "Entropy and diversity", Oikos (2006).
    pub effective: f64,
}

impl LoadBalance {
    /// Measures `counts` (`[n_expert]`). All values are 0 if there are no selections.
    pub fn of(counts: &[u64]) -> LoadBalance {
        let n_expert = counts.len();
        let n_selections = counts.iter().fold(0u64, |sum, &c| sum.saturating_add(c));
        let mut load_balance = LoadBalance {
            n_expert,
            n_selections,
            ..LoadBalance::default()
        };
        if n_selections == 0 {
            return load_balance;
        }
        let (n, total) = (n_expert as f64, n_selections as f64);
        let mut sorted = counts.to_vec();
        sorted.sort_unstable_by_key(|&count| Reverse(count));
        let mut nats = 0.0;
        let mut weighted = 0.0;
        for (place, &count) in sorted.iter().take_while(|&&count| count > 0).enumerate() {
            let share = count as f64 / total;
            nats -= share * share.ln();
            // The ascending rank is i = N - place.
            weighted += (n - 2.0 * place as f64 - 1.0) * share;
            load_balance.n_active += 1;
        }
        for (share, percent) in load_balance.share_top.iter_mut().zip(TOP_PERCENT) {
            let top = &sorted[..n_of_percent(n_expert, percent)];
            *share = top.iter().map(|&count| count as f64).sum::<f64>() / total;
        }
        load_balance.gini = weighted / n;
        load_balance.entropy = if n_expert > 1 { nats / n.ln() } else { 0.0 };
        load_balance.max_over_mean = sorted[0] as f64 / total * n;
        load_balance.effective = nats.exp();
        load_balance
    }

    /// Fraction of the experts with at least one selection.
    pub fn active_fraction(&self) -> f64 {
        self.n_active as f64 / self.n_expert.max(1) as f64
    }
}

/// `percent` % of `n` experts, rounded up.
pub fn n_of_percent(n: usize, percent: usize) -> usize {
    (n * percent).div_ceil(100)
}

/// The `n` hottest experts, hottest first. Ties go to the lower id. Experts without selections are omitted.
pub fn hottest(counts: &[u64], n: usize) -> Vec<usize> {
    let mut experts: Vec<usize> = (0..counts.len()).filter(|&e| counts[e] > 0).collect();
    let by_heat = |&expert: &usize| (Reverse(counts[expert]), expert);
    if n < experts.len() {
        experts.select_nth_unstable_by_key(n, by_heat);
        experts.truncate(n);
    }
    experts.sort_unstable_by_key(by_heat);
    experts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn close(a: f64, b: f64) {
        assert!((a - b).abs() < 1e-12, "{a} {b}");
    }

    #[test]
    fn uniform_counts() {
        let uniform = LoadBalance::of(&[5; 8]);
        close(uniform.entropy, 1.0);
        close(uniform.effective, 8.0);
        close(uniform.gini, 0.0);
        close(uniform.max_over_mean, 1.0);
        close(uniform.active_fraction(), 1.0);
        // 1, 1, 1, 2 and 4 of 8 experts.
        assert_eq!(uniform.share_top, [0.125, 0.125, 0.125, 0.25, 0.5]);
    }

    #[test]
    fn single_active_expert() {
        let one = LoadBalance::of(&[0, 0, 7, 0]);
        assert_eq!((one.entropy, one.effective), (0.0, 1.0));
        assert_eq!((one.max_over_mean, one.n_active), (4.0, 1));
        close(one.gini, 0.75);
        assert_eq!(one.share_top, [1.0; 5]);
        assert_eq!(LoadBalance::of(&[9]).entropy, 0.0);
    }

    /// Distribution ½ ¼ ¼ 0: entropy 1.5 of 2 bits. Gini of 0, 1, 1, 2: (−3·0 − 1·1 + 1·1 + 3·2) / (4·4).
    #[test]
    fn mixed_counts() {
        let some = LoadBalance::of(&[1, 2, 0, 1]);
        close(some.entropy, 0.75);
        close(some.effective, 2f64.powf(1.5));
        close(some.gini, 0.375);
        close(some.max_over_mean, 2.0);
        close(some.active_fraction(), 0.75);
        assert_eq!(some.share_top, [0.5, 0.5, 0.5, 0.5, 0.75]);
    }

    #[test]
    fn empty_counts_yield_zero_instead_of_nan() {
        assert_eq!(LoadBalance::of(&[0; 3]).gini, 0.0);
        assert_eq!(LoadBalance::of(&[]), LoadBalance::default());
        assert_eq!(LoadBalance::of(&[]).active_fraction(), 0.0);
    }

    #[test]
    fn hottest_breaks_ties_by_id() {
        assert_eq!(hottest(&[3, 7, 0, 7, 3], 3), [1, 3, 0]);
        assert_eq!(hottest(&[0, 1], 2), [1]);
        assert_eq!(n_of_percent(32, 10), 4);
        assert_eq!(n_of_percent(0, 10), 0);
    }
}
