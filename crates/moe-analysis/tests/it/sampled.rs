//! LRU estimates from a sample of the experts, compared with complete replays.

use moe_analysis::simulate::{Batches, Error, Estimate, replay, sampled_lru};
use moe_placement::cache::{OnlinePolicy, PolicyInputs, PolicyName};
use moe_trace::Phase;
use proptest::prelude::*;

use crate::synthetic::{batches_of, traces};

fn lru(batches: &Batches, budget: u64) -> moe_analysis::simulate::Outcome {
    let name = PolicyName::Shared(OnlinePolicy::Lru);
    let policy = PolicyInputs::default().policy(name, batches.experts(), budget);
    replay(batches, policy.unwrap().as_mut())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    /// For any sizes, including batches larger than the budget.
    #[test]
    fn full_sample_equals_lru(made in traces(7), mixed: bool) {
        let batches = batches_of(&made, 3, 8, |layer, expert| {
            if mixed { u64::from(1 + u32::from(layer) * 2 + expert % 3) } else { 5 }
        });
        let budgets: Vec<u64> = (0..130).rev().step_by(3).collect();
        for estimate in sampled_lru(&batches, &budgets, 1.0, 7).unwrap() {
            prop_assert_eq!(estimate.outcome, lru(&batches, estimate.budget));
            prop_assert_eq!((estimate.error_pct_cum, estimate.error_pct_decode), (0.0, 0.0));
        }
    }
}

const N_LAYER: u16 = 12;
const N_EXPERT: u32 = 64;

/// Tokens with four experts per layer. Some are those of the previous token, the others have a skewed distribution per
/// layer.
fn tokens(n_token: usize) -> Batches {
    let mut state = 1u64;
    let mut below = |n: u64| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        ((u128::from(state) * u128::from(n)) >> 64) as u32
    };
    let mut last: Vec<Vec<u32>> = vec![Vec::new(); N_LAYER.into()];
    let mut made = Vec::new();
    for _ in 0..n_token {
        for layer in 0..N_LAYER {
            let before = &mut last[usize::from(layer)];
            let mut chosen = Vec::new();
            while chosen.len() < 4 {
                let expert = match below(4) {
                    0 if !before.is_empty() => before[below(4) as usize],
                    _ => (below(64).min(below(64)) * 37 + u32::from(layer) * 11) % N_EXPERT,
                };
                if !chosen.contains(&expert) {
                    chosen.push(expert);
                }
            }
            before.clone_from(&chosen);
            made.push((layer, Phase::Generate, chosen));
        }
    }
    batches_of(&made, N_LAYER, N_EXPERT, |layer, _| {
        5 + u64::from(layer % 2)
    })
}

/// Estimates of samples with different seeds, each with the exact hit rate.
fn against_exact(batches: &Batches, rate: f64) -> Vec<(Estimate, f64)> {
    let total = batches.experts().total_bytes();
    let budgets: Vec<u64> = (1..8).map(|part| total * part / 8).collect();
    let exact: Vec<f64> = budgets
        .iter()
        .map(|&budget| lru(batches, budget).hit_pct_cum())
        .collect();
    let estimates = (0..20).flat_map(|seed| {
        let estimates = sampled_lru(batches, &budgets, rate, seed).unwrap();
        estimates.into_iter().zip(exact.clone())
    });
    estimates.collect()
}

/// At least nine of ten 95 % intervals must contain the exact value; neighboring budgets are correlated.
#[test]
fn confidence_interval_contains_exact_value() {
    let batches = tokens(1500);
    let mut widths = Vec::new();
    for rate in [0.25, 0.5] {
        let estimates = against_exact(&batches, rate);
        let n = estimates.len();
        let off =
            |(estimate, exact): &(Estimate, f64)| (estimate.outcome.hit_pct_cum() - exact).abs();
        let held = estimates.iter().filter(|it| off(it) <= it.0.error_pct_cum);
        let held = held.count();
        assert!(10 * held >= 9 * n, "{rate}: {held} of {n}");
        let mean =
            |of: &dyn Fn(&(Estimate, f64)) -> f64| estimates.iter().map(of).sum::<f64>() / n as f64;
        let (width, off) = (mean(&|it| it.0.error_pct_cum), mean(&off));
        assert!(off < 1.5, "{rate}: mean error of {off} points");
        // A 95 % interval is about 2.5 times the mean error; the estimate must not be much wider.
        assert!(width < 8.0 * off, "{rate}: width {width}, mean error {off}");
        widths.push(width);
    }
    assert!(widths[1] < widths[0], "{widths:?}");
}

#[test]
fn rejects_too_small_sample() {
    let batches = batches_of(&[(0, Phase::Generate, vec![0])], 3, 5, |_, _| 1);
    let result = sampled_lru(&batches, &[1], 1.0, 0);
    assert!(matches!(result, Err(Error::Sample { n: 15, .. })));
}
