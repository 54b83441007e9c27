//! Simulation of all combinations of policies and budgets.

use std::sync::Arc;

use moe_placement::cache::{OnlinePolicy, PolicyInputs, PolicyName};
use moe_placement::learn::LayerObservation;
use rayon::prelude::*;

use super::{Batches, Error, LruCurve, Outcome, replay};

/// Inputs of policies in addition to the trace.
#[derive(Debug, Clone)]
pub struct SimulateOptions {
    /// Observations of a learn file, for the policies that start from one.
    pub learn: Option<Arc<[LayerObservation]>>,
    /// Fraction of the look-ups that the policy `static` counts before it loads experts (0.0 to 1.0).
    pub train_fraction: f64,
    /// Fraction of the hot cache that may be exchanged after a request (0.0 to 1.0).
    pub update_rate: f64,
    /// Seed of random evictions.
    pub seed: u64,
}

/// Result of one policy and budget.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PolicyResult {
    /// Budget in bytes.
    pub budget: u64,
    /// The policy.
    pub policy: PolicyName,
    /// The result.
    pub outcome: Outcome,
}

/// Inputs of `policies` for a trace.
///
/// # Errors
/// [`Error::TooLong`] if a policy needs the future of a trace that is too long.
pub fn policy_inputs(
    batches: &Batches,
    policies: &[PolicyName],
    options: &SimulateOptions,
) -> Result<PolicyInputs, Error> {
    let needs = |names: &[PolicyName]| policies.iter().any(|policy| names.contains(policy));
    let future = if needs(&[PolicyName::Belady, PolicyName::BeladySize]) {
        Some(Arc::new(batches.future().ok_or(Error::TooLong)?))
    } else {
        None
    };
    Ok(PolicyInputs {
        future,
        counts: needs(&[PolicyName::StaticOracle]).then(|| batches.counts().into()),
        learn: options.learn.clone(),
        train_look_ups: (batches.n_look_ups() as f64 * options.train_fraction.clamp(0.0, 1.0))
            as u64,
        update_rate: options.update_rate,
        seed: options.seed,
    })
}

/// Simulates all policies with all budgets. Results are in the given order, with budgets as the outer loop. `on_result` is called
/// after each row, on any thread.
///
/// # Errors
/// [`Error::TooLong`] or [`Error::Policy`] if a policy cannot be built.
pub fn simulate(
    batches: &Batches,
    budgets: &[u64],
    policies: &[PolicyName],
    options: &SimulateOptions,
    on_result: impl Fn() + Sync,
) -> Result<Vec<PolicyResult>, Error> {
    let inputs = policy_inputs(batches, policies, options)?;
    let lru = PolicyName::Shared(OnlinePolicy::Lru);
    let curve = policies.contains(&lru).then(|| LruCurve::new(batches));
    let curve = curve.flatten();
    let pairs = budgets
        .iter()
        .flat_map(|&budget| policies.iter().map(move |&policy| (budget, policy)));
    let pairs: Vec<(u64, PolicyName)> = pairs.collect();
    let results = pairs.into_par_iter().map(|(budget, policy)| {
        let outcome = match &curve {
            Some(curve) if policy == lru => curve.outcome(budget),
            _ => {
                let mut policy = inputs.policy(policy, batches.experts(), budget)?;
                replay(batches, policy.as_mut())
            }
        };
        on_result();
        Ok(PolicyResult {
            budget,
            policy,
            outcome,
        })
    });
    results.collect()
}
