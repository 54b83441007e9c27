//! What was counted, and whether it generalizes, in one line each.

use moe_analysis::hotness::Hotness;
use moe_analysis::stability::{self, HOT_PERCENT, Stability};
use moe_gguf::text::counted;

use super::inputs::{Counted, InputArgs};
use crate::phase_choice::PhaseChoice;

/// Whether the hottest experts of the first half of the tokens are those of the second, the verdict first.
pub fn verdict(read: &Counted) -> String {
    let trust = stability::trust(&read.survey, read.hotness.n_expert());
    let verdict = match trust.verdict {
        Stability::Unordered => {
            return "how far to trust it cannot be told: counts have no order, so nothing can be learned on one part and tested on another".into();
        }
        Stability::TooShort => "too short to trust",
        Stability::Even => "nothing to learn, the experts are chosen evenly",
        Stability::Holds => "it holds",
        Stability::HoldsInPart => "it holds in part",
        Stability::DoesNotHold => "it does not hold",
    };
    let tokens = counted(trust.rows, "token");
    let hot = trust.split.as_ref().and_then(|split| {
        let coverage = split.of_percent(HOT_PERCENT)?;
        Some((split, coverage))
    });
    let Some((split, hot)) = hot else {
        return format!("{verdict}: {tokens}");
    };
    let mut line = format!(
        "{verdict}: the hottest {HOT_PERCENT} % of experts of the first {} cover {:.1} % of the choices of the other {} \
         ({:.1} % of their own, an even router {:.1} %)",
        counted(split.rows_learned, "token"),
        100.0 * hot.out_of_sample,
        split.rows_tested,
        100.0 * hot.in_sample,
        100.0 * hot.uniform,
    );
    if trust.unsettled > 0 {
        line += &format!(
            "; at the end {} still changed",
            match trust.unsettled {
                1 => "the hot set of 1 layer".into(),
                n => format!("the hot sets of {n} layers"),
            }
        );
    }
    line
}

/// How much was counted: `73 prompt and generated tokens in 6 layers, 4 of 32 experts for a token`.
pub fn amount(hotness: &Hotness, phase: PhaseChoice) -> String {
    let phases = phase.phases();
    let layers = hotness.layers(phases);
    let experts = counted(hotness.n_expert(), "expert");
    let tokens = hotness.tokens(phases);
    let place = counted(layers.len() as u64, "layer");
    if tokens == 0 {
        let choices = layers.iter().map(|&layer| hotness.choices(layer, phases));
        let choices = choices.fold(0u64, u64::saturating_add);
        return format!("{} in {place} of {experts}", counted(choices, "choice"));
    }
    format!(
        "{} in {place}, {} of {experts} for a token",
        phase.tokens(tokens),
        hotness.n_expert_used(),
    )
}

/// What was read and how much was counted, for a plot.
pub fn subtitle(inputs: &InputArgs, hotness: &Hotness) -> String {
    format!("{}: {}", inputs.source(), amount(hotness, inputs.phase))
}
