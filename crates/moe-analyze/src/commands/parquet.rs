//! `parquet`: the tables of a run.

use std::path::PathBuf;

use anyhow::bail;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use moe_trace::Run;
use moe_trace::tables::{
    TableOptions, TableSummary, add_to_dataset, dataset_paths, table_paths, write_tables,
};

use crate::cli::{Context, ExitStatus};
use crate::inputs::Kind;
use crate::interrupt;

/// Turn a run into Parquet tables: ops, accesses, routing
#[derive(Debug, clap::Args)]
pub struct Args {
    /// A run directory, or a trace
    run: PathBuf,
    /// Directory for ops.parquet, accesses.parquet and routing.parquet
    #[arg(long, value_name = "DIR", required_unless_present = "dataset")]
    out: Option<PathBuf>,
    /// Add the run to a dataset, partitioned by run
    #[arg(long, value_name = "DIR")]
    dataset: Option<PathBuf>,
    /// Replace tables that exist
    #[arg(long)]
    force: bool,
}

pub fn run(args: Args, ctx: &Context) -> anyhow::Result<ExitStatus> {
    match Kind::of(&args.run)? {
        Kind::Run | Kind::Trace => {}
        _ => bail!(
            "{} is not a run; give a run directory or its trace.bin",
            args.run.display()
        ),
    }
    let run = Run::open(&args.run)?;
    if !args.force {
        refuse_existing(&args, &run)?;
    }
    let interrupted = interrupt::flag()?;
    for remark in run.remarks()? {
        ctx.remark(remark);
    }
    if run.map.is_none() {
        ctx.remark(format_args!(
            "{} has no gguf-map.parquet: where each expert is is not known, accesses name whole tensors",
            args.run.display()
        ));
    }
    if let Some(remark) = run.unresolved_remark() {
        ctx.remark(remark);
    }
    let records = run.trace.size_bytes() / moe_trace::record::RECORD_SIZE as u64;
    if let Some(out) = &args.out {
        let summary = with_progress(ctx, records, |options| {
            write_tables(
                &run,
                out,
                TableOptions {
                    force: args.force,
                    interrupted: Some(&interrupted),
                    ..options
                },
            )
        })?;
        remark(ctx, &summary, &out.display());
    }
    if let Some(dataset) = &args.dataset {
        let summary = with_progress(ctx, records, |options| {
            add_to_dataset(
                &run,
                dataset,
                TableOptions {
                    force: args.force,
                    interrupted: Some(&interrupted),
                    ..options
                },
            )
        })?;
        remark(
            ctx,
            &summary,
            &format_args!("{}, run={}", dataset.display(), run.id()),
        );
    }
    Ok(ExitStatus::Done)
}

/// Looks at all outputs before the first one is written.
fn refuse_existing(args: &Args, run: &Run) -> Result<(), moe_trace::Error> {
    let tables = args.out.iter().flat_map(|out| table_paths(out));
    let parts = args
        .dataset
        .iter()
        .flat_map(|dataset| dataset_paths(run, dataset));
    match tables
        .chain(parts)
        .find(|path| path.symlink_metadata().is_ok())
    {
        Some(path) => Err(moe_trace::Error::Exists { path }),
        None => Ok(()),
    }
}

fn with_progress(
    ctx: &Context,
    records: u64,
    write: impl FnOnce(TableOptions) -> Result<TableSummary, moe_trace::Error>,
) -> anyhow::Result<TableSummary> {
    let target = if ctx.quiet {
        ProgressDrawTarget::hidden()
    } else {
        ProgressDrawTarget::stderr()
    };
    let style =
        ProgressStyle::with_template("{bar:40} {human_pos} of {human_len} records, {eta} left")?;
    let bar = ProgressBar::with_draw_target(Some(records), target).with_style(style);
    let progress = |n_records| bar.inc(n_records);
    let summary = write(TableOptions {
        progress: Some(&progress),
        ..TableOptions::default()
    });
    bar.finish_and_clear();
    Ok(summary?)
}

fn remark(ctx: &Context, summary: &TableSummary, place: &dyn std::fmt::Display) {
    ctx.remark(format_args!(
        "{} records: {} operations, {} accesses, {} routing rows in {place}",
        summary.records, summary.ops, summary.accesses, summary.routing,
    ));
}
