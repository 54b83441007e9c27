//! Warnings about a plan of a hot cache.

use std::path::Path;

use moe_files::text::counted;
use moe_placement::plan::{Plan, PlanVerdict};

/// Returns what the user should know of a plan: experts of unknown size, repeated layers, and an empty cache. `sizes` is the file with the
/// sizes of the experts, or `None` if they are those of the model.
pub fn plan_warnings(plan: &Plan, sizes: Option<&Path>) -> Vec<String> {
    let count = |verdict: PlanVerdict| {
        let decisions = plan.decisions.iter();
        decisions.filter(|d| d.verdict == verdict).count()
    };
    let unknown = match count(PlanVerdict::UnknownSize) {
        0 => None,
        n => Some(unknown_sizes(n, sizes)),
    };
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

fn unknown_sizes(n: usize, sizes: Option<&Path>) -> String {
    let experts = counted(n, "expert");
    let Some(sizes) = sizes else {
        let are = if n == 1 { "is" } else { "are" };
        return format!(
            "warning: {experts} of the learn file {are} not in the model; check that the learn file is of this model"
        );
    };
    let (have, missing) = if n == 1 {
        ("has", "its size")
    } else {
        ("have", "their sizes")
    };
    format!(
        "warning: {experts} of the learn file {have} no size in {}; add {missing}, or check that both files are of the same model",
        sizes.display()
    )
}
