//! `accesses`: how a run reads the model's files.

mod rows;
mod summary;

use std::path::PathBuf;

use moe_analysis::accesses::report;
use moe_gguf::Gguf;
use moe_gguf::map::OffsetMap;
use moe_trace::{Facts, Run};

use crate::context::Context;
use crate::exit_status::ExitStatus;
use crate::files::{self, OutputPath};
use crate::option_values::at_least;
use crate::output::{self, Format};
use crate::progress::Progress;
use crate::traces::{self, OpsArgs};

/// Report how a run reads the model's files: in which order, how much, how far apart, how soon again
///
/// Without -o and --table a summary is printed. Look-ups of embeddings name a whole tensor and read a few rows: they are told
/// by themselves and are in no other figure.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// A run directory, or a trace
    run: PathBuf,
    /// The model, for a trace without a map of it
    #[arg(long, value_name = "FILE.gguf")]
    model: Option<PathBuf>,
    /// Rows to print or write [default: figures]
    #[arg(long, value_enum)]
    table: Option<TableChoice>,
    /// Lengths of the working sets in generated tokens
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_values_t = [1, 2, 4, 8, 16, 32, 64, 128],
          value_parser = at_least(1u64))]
    windows: Vec<u64>,
    /// Format on stdout [default: table]
    #[arg(short, long = "output", value_name = "FORMAT")]
    output: Option<Format>,
    /// Write the rows to a file; its extension chooses: csv, json, jsonl, md
    #[arg(long, value_name = "FILE")]
    out: Option<OutputPath>,
    /// Replace the file of --out if it exists
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    ops: OpsArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
enum TableChoice {
    /// Every figure that is one number
    #[default]
    Figures,
    /// A row a layer and phase: bytes, and time from its first to its last access
    Layers,
    /// Histogram of the distance from one access to the next
    Seeks,
    /// Distinct bytes of windows of generated tokens
    WorkingSets,
    /// A row an expert that was used: how soon it was used again
    Experts,
    /// Histograms of the reuse distance of experts, in tokens and in bytes
    Reuse,
    /// What the run reads that the model's map does not have
    Unresolved,
}

pub fn run(args: Args, ctx: &Context) -> anyhow::Result<ExitStatus> {
    let format_out = args.out.as_deref().map(Format::of_path).transpose()?;
    if let Some(out) = &args.out {
        files::check_output(out, args.force)?;
    }
    let run = open(&args, ctx)?;
    if let Some(remark) = run.unresolved_remark() {
        ctx.remark(remark);
    }
    let mut windows = args.windows.clone();
    windows.sort_unstable();
    windows.dedup();
    let progress = Progress::of_run(ctx, &run);
    let report = report(&run, &windows)?;
    drop(progress);
    let table = args.table.unwrap_or_default();
    if let (Some(out), Some(format)) = (&args.out, format_out) {
        files::write_whole(out, args.force, |file| {
            Ok(rows::write(file, &report, table, format)?)
        })?;
        ctx.remark(format_args!("wrote {}", out.display()));
    }
    match (args.output, args.table) {
        (None, None) if args.out.is_none() => {
            output::to_stdout(None, |stdout| summary::print(stdout, &report))?;
        }
        (None, _) if args.out.is_some() => {}
        (format, _) => output::to_stdout(format, |stdout| {
            rows::write(stdout, &report, table, format.unwrap_or(Format::Table))
        })?,
    }
    Ok(ExitStatus::Done)
}

fn open(args: &Args, ctx: &Context) -> anyhow::Result<Run> {
    let mut run = args.ops.open(&args.run, ctx)?;
    args.ops.check(&[&run])?;
    if let Some(model) = &args.model {
        let gguf = Gguf::open(model)?;
        let named = Facts::of_model(&model.to_string_lossy(), &gguf)?;
        traces::check_model(&run.path, run.manifest.as_ref(), &named)?;
        run.map = Some(OffsetMap::new(&gguf));
    }
    Ok(run)
}
