//! `hotness`: which experts are hot and whether that will hold, as a summary, tables, matrices, pictures, and a learn file for
//! the hot-cache runtime.

mod args;
mod input;
mod matrix;
mod plots;
mod summary;
mod tables;

use std::io::Write;

use anyhow::{Context as _, bail};
use moe_analysis::hotness::{Hotness, Phases};

use crate::context::Context;
use crate::exit_status::ExitStatus;
use crate::expert_usage::{self, LayerUsage};
use crate::files;
use crate::output::{self, Format};
use crate::plot;

pub use args::Args;
use args::{Split, TableChoice};
use input::{Counted, read_all};

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

    let counted = read_all(&args, ctx)?;
    let hotness = &counted.hotness;
    if let (2.., unknown @ 1..) = hotness.n_runs() {
        ctx.remark(format_args!(
            "{} not tell the model; that all are of one was judged by their numbers of experts alone",
            if unknown == 1 { "1 input does".into() } else { format!("{unknown} inputs do") }
        ));
    }
    let phases = args.phases();
    let learn = hotness
        .learn_file(phases)
        .with_context(|| format!("{} tokens", args.phase.describe()))?;
    needs_order(&args, &counted)?;
    let print = printed(&args, &counted)?;
    let mut outputs = Vec::new();
    if let Some(out) = &args.out {
        outputs.push(files::prepare(out, args.force, |file| {
            Ok(file.write_all(learn.to_json().as_bytes())?)
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
        ctx.remark(format_args!("wrote {}", out.display()));
        remark_on_learn_file(hotness, ctx);
    }
    if let Some(path) = &args.matrix {
        ctx.remark(format_args!("wrote {}", path.display()));
    }
    if let Some(plot) = &args.plot {
        ctx.remark(format_args!("drew {}", plot.display()));
    }
    print()?;
    Ok(ExitStatus::Done)
}

/// What the learn file contains in place of what the inputs do not record.
fn remark_on_learn_file(hotness: &Hotness, ctx: &Context) {
    if hotness.n_expert_used() == 0 {
        ctx.remark(
            "  the number of experts of a token is not known: each selection is a call with n_expert_used 1; pass --top-k or --model",
        );
    } else if hotness.has_assumed_calls() {
        ctx.remark("  passes are not recorded: each token counts as one call");
    }
    if !hotness.n_expert_is_known() {
        ctx.remark(format_args!(
            "  the number of experts of a layer is not known: {} were written, up to the last one that was used; pass --model",
            hotness.n_expert()
        ));
    }
}

/// Prints on stdout.
type Print<'a> = Box<dyn FnOnce() -> anyhow::Result<()> + 'a>;

/// Makes what is printed on stdout, before any output is written.
fn printed<'a>(args: &'a Args, counted: &'a Counted) -> anyhow::Result<Print<'a>> {
    let format = args.output.unwrap_or(Format::Table);
    let splits = match (args.rows(), args.split) {
        (Some(TableChoice::Split), _) | (None, Some(_)) => tables::splits(args, counted)?,
        _ => Vec::new(),
    };
    Ok(match args.rows() {
        _ if args.usage => Box::new(move || print_usage(counted, args.phases(), args.output)),
        None => Box::new(move || {
            output::to_stdout(None, |stdout| {
                summary::print(stdout, args, counted, &splits)
            })
        }),
        Some(TableChoice::Matrix) if args.by.is_some() => {
            let matrix = matrix::matrix(args, counted)?;
            Box::new(move || matrix::print(&matrix, format))
        }
        Some(TableChoice::Matrix) => {
            Box::new(move || matrix::print_ranked(counted, args.phases(), format))
        }
        Some(table) => Box::new(move || {
            output::to_stdout(format, |stdout| {
                tables::write(stdout, format, table, args, counted, &splits)
            })
        }),
    })
}

/// Refuses what the user asked for where the input has no order to tell it.
fn needs_order(args: &Args, counted: &Counted) -> anyhow::Result<()> {
    let asked = match (args.table, &args.split) {
        (Some(TableChoice::Drift), _) => "--table drift",
        (Some(TableChoice::Settling), _) => "--table settling",
        (Some(TableChoice::Batches), _) => "--table batches",
        (Some(TableChoice::Bootstrap), _) => "--table bootstrap",
        (_, Some(Split::Time(_))) => "--split by time",
        (_, Some(Split::BySequence)) => "--split by-sequence",
        (Some(TableChoice::Split), None) => "--table split",
        _ => return Ok(()),
    };
    if !counted.survey.is_ordered() {
        bail!(
            "{asked} needs the order of the tokens, and {} holds counts alone; give a trace",
            args.source()
        );
    }
    Ok(())
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
