//! The summary that a person reads: whether it generalizes, how much was counted, a row for each layer.

use std::io::Write;

use moe_analysis::hotness::Hotness;
use moe_analysis::survey::{Survey, TokenPairs};

use super::args::Args;
use crate::counting::inputs::Counted;
use crate::counting::sentences;
use crate::output::{Format, Table, fixed};

/// Experts that the summary names in each layer.
const N_TOP: usize = 4;

/// Prints the summary.
pub fn print(out: &mut dyn Write, args: &Args, counted: &Counted) -> std::io::Result<()> {
    let hotness = &counted.hotness;
    writeln!(out, "{}", sentences::verdict(counted))?;
    writeln!(out, "{}", sentences::amount(hotness, args.inputs.phase))?;
    if let Some(order) = order_line(&counted.survey) {
        writeln!(out, "{order}")?;
    }
    writeln!(out)?;
    print_layers(out, args, hotness)
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
