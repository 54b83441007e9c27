//! How many different experts of a layer a batch of tokens needs.

/// Expected distinct experts of a batch whose tokens choose `n_expert_used` of `n_expert` evenly and independently:
/// N (1 − ((N − k) / N)^B). The line to compare a trace with (vllm#54228, inference-sim#789).
pub fn distinct_if_uniform(n_expert: u32, n_expert_used: u32, batch: u64) -> f64 {
    let n = f64::from(n_expert);
    let missed = (n - f64::from(n_expert_used)).max(0.0) / n.max(1.0);
    n * (1.0 - missed.powf(batch as f64))
}

/// The same where an expert is in a token's choice as often as it was counted, independently from token to token:
/// Σ (1 − (1 − cₑ / rows)^B). As for a batch of unrelated requests; tokens of one text are alike and need fewer.
pub fn distinct_if_independent(counts: &[u64], rows: u64, batch: u64) -> f64 {
    let missed = |count: u64| (1.0 - count as f64 / rows.max(1) as f64).max(0.0);
    let expected = counts.iter().map(|&c| 1.0 - missed(c).powf(batch as f64));
    expected.sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closed_forms() {
        // One token needs its k experts, two need 4 + 4 · 28/32 of them.
        assert!((distinct_if_uniform(32, 4, 1) - 4.0).abs() < 1e-12);
        assert!((distinct_if_uniform(32, 4, 2) - 7.5).abs() < 1e-12);
        assert!((distinct_if_uniform(8, 8, 3) - 8.0).abs() < 1e-12);
        assert!((distinct_if_uniform(32, 4, 1 << 40) - 32.0).abs() < 1e-9);
        assert_eq!(distinct_if_uniform(0, 0, 4), 0.0);
    }

    #[test]
    fn of_even_counts_both_agree() {
        let independent = distinct_if_independent(&[10; 32], 80, 5);
        assert!((independent - distinct_if_uniform(32, 4, 5)).abs() < 1e-12);
        // One expert in every token, two in every other.
        let some = distinct_if_independent(&[8, 4, 4, 0], 8, 2);
        assert!((some - (1.0 + 0.75 + 0.75)).abs() < 1e-12);
    }
}
