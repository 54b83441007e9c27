//! One-line descriptions of counts: the amount, and whether hotness generalizes.

use moe_analysis::hotness::Hotness;
use moe_analysis::stability::{self, HOT_PERCENT, MIN_SELECTIONS_PER_EXPERT, Stability};
use moe_files::text::counted;

use super::inputs::{Counted, InputArgs};
use crate::phase_choice::PhaseChoice;

/// Returns the verdict on whether the hottest experts of the first half of the tokens are those of the second half. The line starts
/// with one of `unknown_order`, `too_short`, `uniform`, `generalizes`, `generalizes_in_part` and `does_not_generalize`.
pub fn verdict(read: &Counted) -> String {
    let assessment = stability::assess(&read.survey, read.hotness.n_expert());
    let verdict = match assessment.verdict {
        Stability::Unordered => {
            return "unknown_order: the input contains only counts, so there is no training split and no held-out split".into();
        }
        Stability::TooShort => "too_short",
        Stability::Uniform => "uniform",
        Stability::Generalizes => "generalizes",
        Stability::GeneralizesInPart => "generalizes_in_part",
        Stability::DoesNotGeneralize => "does_not_generalize",
    };
    let tokens = counted(assessment.tokens, "token");
    let hot = assessment.split.as_ref().and_then(|split| {
        let coverage = split.of_percent(HOT_PERCENT)?;
        Some((split, coverage))
    });
    let Some((split, hot)) = hot else {
        return format!("{verdict}: {tokens}");
    };
    let mut line = format!(
        "{verdict}: the hottest {HOT_PERCENT} % of experts of the first {} cover {:.1} % of the activations of the other {} \
         (in-sample {:.1} %, uniform router {:.1} %)",
        counted(split.train_tokens, "token"),
        100.0 * hot.out_of_sample,
        split.held_out_tokens,
        100.0 * hot.in_sample,
        100.0 * hot.uniform,
    );
    if assessment.unconverged > 0 {
        line += &format!(
            "; not converged in {}",
            counted(assessment.unconverged, "layer")
        );
    }
    if assessment.verdict == Stability::TooShort {
        line += &format!(
            "; a verdict needs at least {MIN_SELECTIONS_PER_EXPERT} activations per expert in each half"
        );
    }
    line
}

/// Returns the amount that was counted: `73 prompt and generated tokens in 6 layers, 4 of 32 experts per token`.
pub fn amount(hotness: &Hotness, phase: PhaseChoice) -> String {
    let phases = phase.phases();
    let layers = hotness.layers(phases);
    let experts = counted(hotness.n_expert(), "expert");
    let tokens = hotness.tokens(phases);
    let n_layers = counted(layers.len() as u64, "layer");
    if tokens == 0 {
        let activations = layers
            .iter()
            .map(|&layer| hotness.selections(layer, phases));
        let activations = activations.fold(0u64, u64::saturating_add);
        return format!(
            "{} in {n_layers} of {experts}",
            counted(activations, "activation")
        );
    }
    format!(
        "{} in {n_layers}, {} of {experts} per token",
        phase.tokens(tokens),
        hotness.n_expert_used(),
    )
}

/// Returns the inputs and the amount that was counted, for a plot.
pub fn subtitle(inputs: &InputArgs, hotness: &Hotness) -> String {
    format!("{}: {}", inputs.source(), amount(hotness, inputs.phase))
}
