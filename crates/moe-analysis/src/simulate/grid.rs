//! Policies × budgets, side by side.

use std::sync::Arc;

use moe_placement::cache::{Online, PolicyName, Setting};
use moe_placement::learn::LayerObservation;
use rayon::prelude::*;

use super::{Batches, Error, LruCurve, Outcome, replay};

/// What policies are made from beside the trace.
#[derive(Debug, Clone)]
pub struct SimulateOptions {
    /// Observations of a learn file, for the policies that start from one.
    pub learn: Option<Arc<[LayerObservation]>>,
    /// Share of the look-ups that `static` learns from.
    pub first: f64,
    /// Share of the hot cache that may be exchanged after a request.
    pub update_rate: f64,
    /// Of random choices.
    pub seed: u64,
}

/// One cache.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Row {
    /// Bytes that it may hold.
    pub budget: u64,
    /// Its policy.
    pub policy: PolicyName,
    /// What it did.
    pub outcome: Outcome,
}

/// What policies of a trace are made from.
///
/// # Errors
/// [`Error::TooLong`] if a policy must know the future of a trace that is too long.
pub fn setting(
    batches: &Batches,
    policies: &[PolicyName],
    options: &SimulateOptions,
) -> Result<Setting, Error> {
    let wants = |wanted: &[PolicyName]| policies.iter().any(|policy| wanted.contains(policy));
    let future = if wants(&[PolicyName::Belady, PolicyName::BeladySize]) {
        Some(Arc::new(batches.future().ok_or(Error::TooLong)?))
    } else {
        None
    };
    Ok(Setting {
        future,
        counts: wants(&[PolicyName::StaticOracle]).then(|| batches.counts().into()),
        learn: options.learn.clone(),
        first_look_ups: (batches.n_look_ups() as f64 * options.first.clamp(0.0, 1.0)) as u64,
        update_rate: options.update_rate,
        seed: options.seed,
    })
}

/// Simulates all policies at all budgets: a row for each budget and policy, in the order given, budgets outside. `on_row` is
/// called after each, on any thread.
///
/// # Errors
/// [`Error::TooLong`] or [`Error::Policy`] if a policy cannot be made.
pub fn simulate(
    batches: &Batches,
    budgets: &[u64],
    policies: &[PolicyName],
    options: &SimulateOptions,
    on_row: impl Fn() + Sync,
) -> Result<Vec<Row>, Error> {
    let setting = setting(batches, policies, options)?;
    let lru = PolicyName::Whole(Online::Lru);
    let curve = policies.contains(&lru).then(|| LruCurve::new(batches));
    let curve = curve.flatten();
    let pairs = budgets
        .iter()
        .flat_map(|&budget| policies.iter().map(move |&policy| (budget, policy)));
    let pairs: Vec<(u64, PolicyName)> = pairs.collect();
    let rows = pairs.into_par_iter().map(|(budget, policy)| {
        let outcome = match &curve {
            Some(curve) if policy == lru => curve.outcome(budget),
            _ => {
                let mut policy = setting.policy(policy, batches.experts(), budget)?;
                replay(batches, policy.as_mut())
            }
        };
        on_row();
        Ok(Row {
            budget,
            policy,
            outcome,
        })
    });
    rows.collect()
}
