//! Warnings about a plan of a hot cache.

use moe_placement::plan::{Plan, PlanVerdict};

/// Returns what the user should know of a plan: experts that the model does not have, repeated layers, and an empty cache.
pub fn plan_warnings(plan: &Plan) -> Vec<String> {
    let count = |verdict: PlanVerdict| {
        let decisions = plan.decisions.iter();
        decisions.filter(|d| d.verdict == verdict).count()
    };
    let unknown = match count(PlanVerdict::UnknownSize) {
        0 => None,
        1 => Some("1 expert of the learn file is".to_owned()),
        n => Some(format!("{n} experts of the learn file are")),
    };
    let unknown = unknown.map(|experts| {
        format!("warning: {experts} not in the model; check that the learn file is of this model")
    });
    let repeated = (count(PlanVerdict::Repeated) > 0).then_some(
        "warning: the learn file contains a layer twice; if both contain an expert, its higher score counts",
    );
    let is_too_small = plan.is_empty()
        && plan
            .decisions
            .iter()
            .any(|d| d.verdict != PlanVerdict::UnknownSize);
    let empty = is_too_small.then_some(
        "warning: the budget is too small: a layer needs space for an expert and an empty expert; the cache is empty",
    );
    let fixed = [repeated, empty].into_iter().flatten();
    unknown
        .into_iter()
        .chain(fixed.map(str::to_owned))
        .collect()
}
