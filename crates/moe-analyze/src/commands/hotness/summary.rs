//! The summary that a person reads: how far to trust it, how much was counted, a row a layer.

use std::io::Write;

use moe_analysis::hotness::Hotness;
use moe_analysis::stability::{self, HOT_PERCENT, Stability, Trust};
use moe_analysis::survey::{Survey, TokenPairs};
use moe_gguf::text::counted;

use super::args::Args;
use super::input::Counted;
use super::tables::Table;
use crate::output::{Format, write_rows};
use crate::phase_choice::PhaseChoice;

/// Experts that the summary names in each layer.
const N_TOP: usize = 4;

/// Prints the summary, and what was learned on one part and tested on another, if that was asked for.
pub fn print(
    out: &mut dyn Write,
    args: &Args,
    counted: &Counted,
    split: Option<&Table>,
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
    if let Some(split) = split {
        writeln!(out)?;
        split.write(out, Format::Table)?;
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
    let columns = [
        "layer",
        "rows",
        "active",
        "hottest experts (share %)",
        "top 10 %",
        "top 25 %",
        "entropy",
        "max/mean",
    ];
    let width = hotness.n_expert().saturating_sub(1).to_string().len();
    let layers = hotness.summary(args.phases(), N_TOP).into_iter();
    let rows = layers.map(|layer| {
        let top: Vec<String> = layer
            .top
            .iter()
            .map(|&(expert, share)| format!("{expert:>width$} ({:4.1})", 100.0 * share))
            .collect();
        let spread = layer.spread;
        vec![
            layer.layer.into(),
            Some(layer.rows).filter(|&rows| rows > 0).into(),
            (spread.n_active as u64).into(),
            top.join("  ").into(),
            format!("{:5.1} %", 100.0 * spread.share_top[2]).into(),
            format!("{:5.1} %", 100.0 * spread.share_top[3]).into(),
            format!("{:.3}", spread.entropy).into(),
            format!("{:5.2}", spread.max_over_mean).into(),
        ]
    });
    write_rows(out, Format::Table, &columns, rows)
}
