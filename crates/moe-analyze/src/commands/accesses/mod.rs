//! `accesses`: how a run reads the model's files.

mod rows;
mod summary;

use std::path::PathBuf;

use moe_analysis::accesses::report;
use moe_gguf::Gguf;
use moe_gguf::map::OffsetMap;
use moe_trace::{ModelInfo, Run};

use crate::context::Context;
use crate::exit_status::ExitStatus;
use crate::option_values::at_least;
use crate::output::{self, Format, RowOutputArgs};
use crate::progress::Progress;
use crate::traces::{self, OpsArgs};

/// Analyze how a run reads the model files: order, bytes, seeks, working sets and reuse distances
///
/// Reads a run directory and prints a summary; with -o, --table or --out, the rows of a table. Token embedding lookups
/// read a few rows of a large tensor; they are reported separately and are not included in the other figures.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  moe-analyze accesses runs/first --table layers -o csv")]
pub struct Args {
    /// Run directory, or a trace.bin
    run: PathBuf,
    /// Model of the trace, a GGUF file; needed for a run without gguf-map.parquet
    #[arg(long, value_name = "FILE.gguf")]
    model: Option<PathBuf>,
    /// Table to print or write [default: figures]
    #[arg(long, value_enum)]
    table: Option<TableChoice>,
    /// Window lengths of the working sets in generated tokens, each at least 1 [default: 1,2,4,8,16,32,64,128]
    #[arg(long, value_name = "N[,…]", value_delimiter = ',', default_values_t = [1, 2, 4, 8, 16, 32, 64, 128], hide_default_value = true,
          value_parser = at_least(1u64))]
    windows: Vec<u64>,
    #[command(flatten)]
    rows: RowOutputArgs,
    #[command(flatten)]
    ops: OpsArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
enum TableChoice {
    /// One row per figure of the summary
    #[default]
    Figures,
    /// One row per layer and phase: bytes, and the time from the layer's first to its last access
    Layers,
    /// Histogram of the distance between consecutive accesses
    Seeks,
    /// One row per window length: distinct bytes read in a window of generated tokens
    WorkingSets,
    /// One row per used expert: its reuse distances
    Experts,
    /// Histograms of the reuse distances of experts, in tokens and in bytes
    Reuse,
    /// Accesses of the run that the model's map does not contain
    Unresolved,
}

pub fn run(args: Args, ctx: &Context) -> anyhow::Result<ExitStatus> {
    args.rows.check()?;
    let run = open(&args, ctx)?;
    if let Some(warning) = run.unresolved_warning() {
        ctx.note(warning);
    }
    let mut windows = args.windows.clone();
    windows.sort_unstable();
    windows.dedup();
    let progress = Progress::of_run(ctx, &run);
    let report = report(&run, &windows)?;
    drop(progress);
    let table = args.table.unwrap_or_default();
    args.rows.write_file(ctx, |file, format| {
        Ok(rows::write(file, &report, table, format)?)
    })?;
    match (args.rows.format(), args.table) {
        _ if !args.rows.prints() => {}
        (None, None) => output::to_stdout(None, |stdout| summary::print(stdout, &report))?,
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
        let named = ModelInfo::from_gguf(&model.to_string_lossy(), &gguf)?;
        traces::check_model(&run.path, run.manifest.as_ref(), &named)?;
        // The map of the run also has the tensors of its adapters.
        run.map.get_or_insert_with(|| OffsetMap::new(&gguf));
    }
    Ok(run)
}
