//! `hotness`: activations of experts as a summary, tables, matrices, plots, and a learn file for the hot expert cache.

mod args;
mod matrix;
mod plots;
mod summary;
mod tables;

use std::io::Write;

use anyhow::bail;
use moe_analysis::Phases;
use moe_analysis::hotness::Hotness;
use moe_analysis::survey;

use crate::context::Context;
use crate::counting::inputs::Counted;
use crate::exit_status::ExitStatus;
use crate::expert_usage::{self, LayerUsage};
use crate::files;
use crate::output::{self, Format};
use crate::plot;

pub use args::Args;
use args::TableChoice;

pub fn run(args: Args, ctx: &Context) -> anyhow::Result<ExitStatus> {
    args.check()?;
    if let Some(plot) = &args.plot {
        plot::check_extension(plot)?;
    }
    if let Some(out) = &args.out {
        files::require_extension(out, "json")?;
    }
    if let Some(matrix) = &args.matrix {
        matrix::check_extension(matrix)?;
    }
    for out in args.out.iter().chain(&args.plot).chain(&args.matrix) {
        files::check_output(out, args.force)?;
    }

    let survey = if args.needs_survey() {
        Some(survey::SurveyOptions {
            group_by: args.group_by(),
            ..args.inputs.survey()?
        })
    } else {
        None
    };
    let counted = args.inputs.read(survey, ctx)?;
    let hotness = &counted.hotness;
    if args.table == Some(TableChoice::Batches) && !counted.survey.is_ordered() {
        bail!(
            "--table batches needs the order of tokens, but {} contains only counts; pass a trace",
            args.inputs.source()
        );
    }
    matrix::check_value(&args, &counted)?;
    let mut outputs = Vec::new();
    if let Some(out) = &args.out {
        let learn = hotness.learn_file(args.phases())?.to_json();
        outputs.push(files::prepare(out, args.force, |file| {
            Ok(file.write_all(learn.as_bytes())?)
        })?);
    }
    if let Some(path) = &args.matrix {
        outputs.push(matrix::prepare(&args, &counted, path)?);
    }
    if let Some(plot) = &args.plot {
        outputs.push(plots::prepare(&args, &counted, plot)?);
    }
    files::commit(outputs)?;
    if let Some(out) = &args.out {
        ctx.note(format_args!("wrote {}", out.display()));
        note_learn_file_assumptions(hotness, ctx);
    }
    if let Some(path) = &args.matrix {
        ctx.note(format_args!("wrote {}", path.display()));
    }
    if let Some(plot) = &args.plot {
        ctx.note(format_args!("wrote {}", plot.display()));
    }
    print(&args, &counted)?;
    Ok(ExitStatus::Done)
}

/// Prints the assumptions in the learn file that replace information missing from the inputs.
fn note_learn_file_assumptions(hotness: &Hotness, ctx: &Context) {
    if hotness.n_expert_used() == 0 {
        ctx.note(
            "  the number of experts per token is unknown: each activation counts as one call with n_expert_used 1; pass --top-k or --model",
        );
    } else if hotness.has_assumed_calls() {
        ctx.note("  passes are not recorded: each token counts as one call");
    }
    if !hotness.n_expert_is_known() {
        ctx.note(format_args!(
            "  the number of experts per layer is unknown: the file contains {}, up to the last one that was used; pass --model",
            hotness.n_expert()
        ));
    }
}

/// Prints the selected output on stdout.
fn print(args: &Args, counted: &Counted) -> anyhow::Result<()> {
    let format = args.output.unwrap_or(Format::Table);
    match args.rows() {
        _ if args.usage => print_usage(counted, args.phases(), args.output),
        None => output::to_stdout(None, |stdout| summary::print(stdout, args, counted)),
        Some(TableChoice::Matrix) if args.by.is_some() => {
            matrix::print(&matrix::matrix(args, counted), format)
        }
        Some(TableChoice::Matrix) => matrix::print_ranked(counted, args.phases(), format),
        Some(table) => output::to_stdout(format, |stdout| {
            tables::write(stdout, format, table, args, counted)
        }),
    }
}

fn print_usage(counted: &Counted, phases: Phases, format: Option<Format>) -> anyhow::Result<()> {
    let hotness = &counted.hotness;
    let layers = hotness.layers(phases).into_iter().map(|layer| LayerUsage {
        layer,
        counts: hotness.counts(layer, phases),
    });
    let layers: Vec<LayerUsage> = layers.collect();
    let n_tokens = hotness.tokens(phases);
    output::to_stdout(format, |stdout| match format {
        None => stdout.write_all(expert_usage::report(&layers, n_tokens, true).as_bytes()),
        Some(Format::Json) => stdout.write_all(expert_usage::json(&layers).as_bytes()),
        Some(format) => expert_usage::write(stdout, format, &layers),
    })
}
