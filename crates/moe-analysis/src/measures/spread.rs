//! How evenly choices fall on experts.

use std::cmp::Reverse;

/// Shares of the experts of which the share of the choices is told, in percent.
pub const TOP_PERCENT: [usize; 5] = [1, 5, 10, 25, 50];

/// The spread of counts over experts (or over all slots, layer × expert, of a model).
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Spread {
    /// Experts, chosen or not: N.
    pub n_expert: usize,
    /// Sum of the counts.
    pub choices: u64,
    /// Experts chosen at least once.
    pub n_active: usize,
    /// Share of the choices that fell on the hottest 1, 5, 10, 25 and 50 % of the experts ([`TOP_PERCENT`], rounded up to
    /// whole experts): points of the Lorenz curve, read from its top.
    pub share_top: [f64; TOP_PERCENT.len()],
    /// Gini coefficient of the counts, Σ (2i − N − 1) xᵢ / (N Σ x) with x ascending: 0 is even, 1 − 1/N is one expert alone
    /// (Gini 1912; the form for a finite population of Sen, *On Economic Inequality*, 1973).
    pub gini: f64,
    /// Shannon entropy of the shares over that of an even spread, H / ln N: 1 is even, 0 is one expert alone (Shannon 1948;
    /// as a bounded metric of routers in TRL, trl#4611).
    pub entropy: f64,
    /// Choices of the hottest expert over the mean of all: 1 is even, N is one expert alone (the imbalance that expert-parallel
    /// load balancers, as DeepSeek's EPLB, minimise over their devices).
    pub max_over_mean: f64,
    /// Effective number of experts, exp H: so many experts in even use would have the same entropy (Hill number of order 1;
    /// Jost, *Entropy and diversity*, Oikos 2006).
    pub effective: f64,
}

impl Spread {
    /// Measures counts, `[n_expert]` by expert. Without any choice everything is 0.
    pub fn of(counts: &[u64]) -> Spread {
        let n_expert = counts.len();
        let choices = counts.iter().fold(0u64, |sum, &c| sum.saturating_add(c));
        let mut spread = Spread {
            n_expert,
            choices,
            ..Spread::default()
        };
        if choices == 0 {
            return spread;
        }
        let (n, total) = (n_expert as f64, choices as f64);
        let mut sorted = counts.to_vec();
        sorted.sort_unstable_by_key(|&count| Reverse(count));
        let mut nats = 0.0;
        let mut weighted = 0.0;
        for (place, &count) in sorted.iter().take_while(|&&count| count > 0).enumerate() {
            let share = count as f64 / total;
            nats -= share * share.ln();
            // The rank i from below is N - place.
            weighted += (n - 2.0 * place as f64 - 1.0) * share;
            spread.n_active += 1;
        }
        for (share, percent) in spread.share_top.iter_mut().zip(TOP_PERCENT) {
            let top = &sorted[..n_of_percent(n_expert, percent)];
            *share = top.iter().map(|&count| count as f64).sum::<f64>() / total;
        }
        spread.gini = weighted / n;
        spread.entropy = if n_expert > 1 { nats / n.ln() } else { 0.0 };
        spread.max_over_mean = sorted[0] as f64 / total * n;
        spread.effective = nats.exp();
        spread
    }

    /// Share of the experts that were chosen at least once.
    pub fn active_fraction(&self) -> f64 {
        self.n_active as f64 / self.n_expert.max(1) as f64
    }
}

/// `percent` of `n` experts, rounded up to whole ones.
pub fn n_of_percent(n: usize, percent: usize) -> usize {
    (n * percent).div_ceil(100)
}

/// The `n` hottest experts, hottest first; of equal ones the lower id. Experts that were never chosen are not among them.
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
    fn even_use() {
        let even = Spread::of(&[5; 8]);
        close(even.entropy, 1.0);
        close(even.effective, 8.0);
        close(even.gini, 0.0);
        close(even.max_over_mean, 1.0);
        close(even.active_fraction(), 1.0);
        // 1, 1, 1, 2 and 4 of 8 experts.
        assert_eq!(even.share_top, [0.125, 0.125, 0.125, 0.25, 0.5]);
    }

    #[test]
    fn one_expert_alone() {
        let one = Spread::of(&[0, 0, 7, 0]);
        assert_eq!((one.entropy, one.effective), (0.0, 1.0));
        assert_eq!((one.max_over_mean, one.n_active), (4.0, 1));
        close(one.gini, 0.75);
        assert_eq!(one.share_top, [1.0; 5]);
        assert_eq!(Spread::of(&[9]).entropy, 0.0);
    }

    /// Shares 1/2, 1/4, 1/4, 0: 1.5 bits of 2. Gini of 0, 1, 1, 2: (−3·0 − 1·1 + 1·1 + 3·2) / (4·4).
    #[test]
    fn in_between() {
        let some = Spread::of(&[1, 2, 0, 1]);
        close(some.entropy, 0.75);
        close(some.effective, 2f64.powf(1.5));
        close(some.gini, 0.375);
        close(some.max_over_mean, 2.0);
        close(some.active_fraction(), 0.75);
        assert_eq!(some.share_top, [0.5, 0.5, 0.5, 0.5, 0.75]);
    }

    #[test]
    fn nothing_is_zero_and_not_nan() {
        assert_eq!(Spread::of(&[0; 3]).gini, 0.0);
        assert_eq!(Spread::of(&[]), Spread::default());
        assert_eq!(Spread::of(&[]).active_fraction(), 0.0);
    }

    #[test]
    fn the_hottest_with_ties() {
        assert_eq!(hottest(&[3, 7, 0, 7, 3], 3), [1, 3, 0]);
        assert_eq!(hottest(&[0, 1], 2), [1]);
        assert_eq!(n_of_percent(32, 10), 4);
        assert_eq!(n_of_percent(0, 10), 0);
    }
}
