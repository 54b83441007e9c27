//! `stability`: whether the hot experts of one part of a trace are hot in another part.

mod args;
mod plot;
mod tables;

use std::io::{self, Write};

use anyhow::bail;
use moe_analysis::stability::{Split, split_by_group, split_by_time};
use moe_analysis::survey;

use crate::context::Context;
use crate::counting::inputs::Counted;
use crate::counting::sentences;
use crate::exit_status::ExitStatus;
use crate::files;
use crate::output::{self, Format};
use crate::plot::check_extension;

pub use args::Args;
use args::{SplitChoice, TableChoice};

pub fn run(args: Args, ctx: &Context) -> anyhow::Result<ExitStatus> {
    args.check()?;
    if let Some(plot) = &args.plot {
        check_extension(plot)?;
        files::check_output(plot, args.force)?;
    }
    let counted = args.inputs.read(
        Some(survey::SurveyOptions {
            folds: args.split() == SplitChoice::BySequence,
            ..args.inputs.survey()?
        }),
        ctx,
    )?;
    if let Some(option) = args.needs_order()
        && !counted.survey.is_ordered()
    {
        bail!(
            "{option} needs the order of tokens, but {} contains only counts; pass a trace",
            args.inputs.source()
        );
    }
    let splits = match args.table() {
        TableChoice::Split => split(&args, &counted)?,
        _ => Vec::new(),
    };
    if let Some(plot) = &args.plot {
        files::commit(vec![
            plot::coverage(&args, &counted).prepare(plot, args.force)?,
        ])?;
        ctx.note(format_args!("wrote {}", plot.display()));
    }
    output::to_stdout(args.output, |stdout| match (args.table, args.output) {
        (None, None) => print_summary(stdout, &args, &counted, &splits),
        (_, format) => {
            let format = format.unwrap_or(Format::Table);
            tables::write(stdout, format, &args, &counted, &splits)
        }
    })?;
    Ok(ExitStatus::Done)
}

/// Counts the training split and measures coverage of the held-out split.
///
/// # Errors
/// There is only one sequence or label.
fn split(args: &Args, counted: &Counted) -> anyhow::Result<Vec<Split>> {
    let survey = &counted.survey;
    let layers = counted.hotness.layers(args.inputs.phases());
    let n_expert = counted.hotness.n_expert();
    Ok(match args.split() {
        SplitChoice::Time(fraction) => Vec::from_iter(split_by_time(survey, n_expert, fraction)),
        SplitChoice::BySequence => split_by_group(survey.folds(), &layers, n_expert, "sequence")?,
        SplitChoice::ByLabel => split_by_group(survey.labels(), &layers, n_expert, "label")?,
    })
}

/// Prints the verdict, then the coverage of hot sets.
fn print_summary(
    out: &mut dyn Write,
    args: &Args,
    counted: &Counted,
    splits: &[Split],
) -> io::Result<()> {
    writeln!(out, "{}", sentences::verdict(counted))?;
    writeln!(
        out,
        "{}\n",
        sentences::amount(&counted.hotness, args.inputs.phase)
    )?;
    tables::split(out, Format::Table, splits)
}
