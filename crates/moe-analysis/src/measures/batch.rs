//! Expected numbers of distinct experts that a batch of tokens selects in a layer.

/// Expected number of distinct experts that a batch of B = `batch` tokens selects in a layer with a uniform router:
/// N (1 − ((N − k) / N)^B), with N = `n_expert` and k = `n_expert_used`. Tokens are independent.
///
/// It is the reference line for measured traces. Source: <https://github.com/vllm-project/vllm/pull/54228>.
pub fn distinct_if_uniform(n_expert: u32, n_expert_used: u32, batch: u64) -> f64 {
    let n = f64::from(n_expert);
    let missed = (n - f64::from(n_expert_used)).max(0.0) / n.max(1.0);
    n * (1.0 - missed.powf(batch as f64))
}

/// Expected number of distinct experts that a batch of B = `batch` independent tokens selects with the measured frequencies:
/// Σₑ (1 − (1 − cₑ / T)^B), with cₑ = `counts[e]` and T = `n_tokens`, the number of counted tokens.
///
/// This models a batch of unrelated requests. Tokens of one text are correlated and select fewer distinct experts.
pub fn distinct_if_independent(counts: &[u64], n_tokens: u64, batch: u64) -> f64 {
    let missed = |count: u64| (1.0 - count as f64 / n_tokens.max(1) as f64).max(0.0);
    let expected = counts.iter().map(|&c| 1.0 - missed(c).powf(batch as f64));
    expected.sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matches_closed_forms() {
        // One token selects k = 4 experts. Two select 4 + 4 · 28/32.
        assert!((distinct_if_uniform(32, 4, 1) - 4.0).abs() < 1e-12);
        assert!((distinct_if_uniform(32, 4, 2) - 7.5).abs() < 1e-12);
        assert!((distinct_if_uniform(8, 8, 3) - 8.0).abs() < 1e-12);
        assert!((distinct_if_uniform(32, 4, 1 << 40) - 32.0).abs() < 1e-9);
        assert_eq!(distinct_if_uniform(0, 0, 4), 0.0);
    }

    #[test]
    fn both_agree_for_uniform_counts() {
        let independent = distinct_if_independent(&[10; 32], 80, 5);
        assert!((independent - distinct_if_uniform(32, 4, 5)).abs() < 1e-12);
        // One expert is selected by every token, two by every other token.
        let some = distinct_if_independent(&[8, 4, 4, 0], 8, 2);
        assert!((some - (1.0 + 0.75 + 0.75)).abs() < 1e-12);
    }
}
