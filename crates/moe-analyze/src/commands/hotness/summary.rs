//! The summary: whether hotness generalizes, how much was counted, and one row per layer.

use std::io::Write;

use moe_analysis::hotness::Hotness;
use moe_analysis::survey::{Survey, TokenPairs};

use super::args::Args;
use crate::counting::inputs::Counted;
use crate::counting::sentences;
use crate::output::{Format, Table, fixed};

/// Hottest experts of each layer in the summary.
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

/// Describes the overlap of consecutive tokens.
fn order_line(survey: &Survey) -> Option<String> {
    let mut all = TokenPairs::default();
    for layer in survey.layers() {
        all.merge(survey.order(layer)?);
    }
    Some(format!(
        "consecutive tokens share {:.1} % of their experts; the expert with the highest weight is the same in {:.1} % of pairs",
        100.0 * all.overlap()?,
        100.0 * all.repeat_first()?,
    ))
}

fn print_layers(out: &mut dyn Write, args: &Args, hotness: &Hotness) -> std::io::Result<()> {
    let width = hotness.n_expert().saturating_sub(1).to_string().len();
    let percent = |share: f64| fixed(100.0 * share, 1);
    Table::of(&hotness.summary(args.phases(), N_TOP))
        .shown("layer", |layer| layer.layer)
        .shown("tokens", |layer| (layer.tokens > 0).then_some(layer.tokens))
        .shown("active experts", |layer| layer.load_balance.n_active)
        .shown("hottest experts (% of activations)", move |layer| {
            let top = layer.top.iter();
            let top =
                top.map(|&(expert, share)| format!("{expert:>width$} ({:4.1})", 100.0 * share));
            top.collect::<Vec<_>>().join("  ")
        })
        .shown("coverage of top 10 % (%)", move |layer| {
            percent(layer.load_balance.share_top[2])
        })
        .shown("coverage of top 25 % (%)", move |layer| {
            percent(layer.load_balance.share_top[3])
        })
        .shown("entropy (0..1)", |layer| {
            fixed(layer.load_balance.entropy, 3)
        })
        .shown("max/mean (×)", |layer| {
            fixed(layer.load_balance.max_over_mean, 2)
        })
        .write(out, Format::Table)
}
