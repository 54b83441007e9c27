//! The summary that a person reads: how far to trust it, how much was counted, a row a layer.

use std::io::Write;

use moe_analysis::hotness::Hotness;
use moe_analysis::stability::{self, HOT_PERCENT, Split, Stability, Trust};
use moe_analysis::survey::{Survey, TokenPairs};
use moe_gguf::text::counted;

use super::args::Args;
use super::input::Counted;
use super::tables;
use crate::output::{Format, Table, fixed};
use crate::phase_choice::PhaseChoice;

/// Experts that the summary names in each layer.
const N_TOP: usize = 4;

/// Prints the summary, and what was learned on one part and tested on another, if that was asked for.
pub fn print(
    out: &mut dyn Write,
    args: &Args,
    counted: &Counted,
    splits: &[Split],
) -> std::io::Result<()> {
    let hotness = &counted.hotness;
    let trust = stability::trust(&counted.survey, hotness.n_expert());
    writeln!(out, "{}", trust_line(&trust))?;
    writeln!(out, "{}", counted_tokens(hotness, args.phase))?;
    if let Some(order) = order_line(&counted.survey) {
        writeln!(out, "{order}")?;
    }
    writeln!(out)?;
    print_layers(out, args, hotness)?;
    if args.split.is_some() {
        writeln!(out)?;
        tables::split(out, Format::Table, splits)?;
    }
    Ok(())
}

/// One line, the verdict first.
fn trust_line(trust: &Trust) -> String {
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
pub fn counted_tokens(hotness: &Hotness, phase: PhaseChoice) -> String {
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

/// What consecutive tokens have in common.
fn order_line(survey: &Survey) -> Option<String> {
    let mut all = TokenPairs::default();
    for layer in survey.layers() {
        all.merge(survey.order(layer)?);
    }
    Some(format!(
        "consecutive tokens share {:.1} % of their experts; the first choice repeats in {:.1} %",
        100.0 * all.overlap()?,
        100.0 * all.repeat_first()?,
    ))
}

fn print_layers(out: &mut dyn Write, args: &Args, hotness: &Hotness) -> std::io::Result<()> {
    let width = hotness.n_expert().saturating_sub(1).to_string().len();
    let percent = |share: f64| fixed(100.0 * share, 1);
    Table::of(&hotness.summary(args.phases(), N_TOP))
        .shown("layer", |layer| layer.layer)
        .shown("tokens", |layer| (layer.rows > 0).then_some(layer.rows))
        .shown("active", |layer| layer.spread.n_active)
        .shown("hottest experts (share, %)", move |layer| {
            let top = layer.top.iter();
            let top =
                top.map(|&(expert, share)| format!("{expert:>width$} ({:4.1})", 100.0 * share));
            top.collect::<Vec<_>>().join("  ")
        })
        .shown("top 10 % cover (%)", move |layer| {
            percent(layer.spread.share_top[2])
        })
        .shown("top 25 % cover (%)", move |layer| {
            percent(layer.spread.share_top[3])
        })
        .shown("entropy", |layer| fixed(layer.spread.entropy, 3))
        .shown("max/mean", |layer| fixed(layer.spread.max_over_mean, 2))
        .write(out, Format::Table)
}
