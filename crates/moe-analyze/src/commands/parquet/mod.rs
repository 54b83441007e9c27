//! `parquet`: the tables of a run.

mod foreign;

use std::path::PathBuf;

use anyhow::bail;
use moe_foreign::{Detected, ImportOptions, Input};
use moe_gguf::map::OffsetMap;
use moe_gguf::text::counted;
use moe_trace::Run;
use moe_trace::tables::{
    PendingTables, TableOptions, TableSummary, dataset_paths, prepare_for_dataset, prepare_tables,
    table_paths,
};

use crate::context::Context;
use crate::exit_status::ExitStatus;
use crate::files::OutputPath;
use crate::interrupt;
use crate::progress::Progress;
use crate::traces::{self, TraceArgs};

/// Turn a run into Parquet tables: ops, accesses, routing
///
/// A trace of another tool gives the tables that it can fill.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// A run directory, a trace, or a trace of another tool
    run: PathBuf,
    /// Directory for ops.parquet, accesses.parquet and routing.parquet
    #[arg(long, value_name = "DIR", required_unless_present = "dataset")]
    out: Option<OutputPath>,
    /// Add the run to a dataset, partitioned by run
    #[arg(long, value_name = "DIR")]
    dataset: Option<OutputPath>,
    /// Replace tables that exist
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    trace: TraceArgs,
}

pub fn run(args: Args, ctx: &Context) -> anyhow::Result<ExitStatus> {
    args.trace.check(&[&args.run])?;
    let options = args.trace.options()?;
    match traces::open(&args.run, &options)? {
        Input::Run(run) => write_run(&args, *run, ctx),
        Input::Tables(_) => bail!(
            "{} is a table already; give a run directory, its trace.bin, or a trace of another tool",
            args.run.display()
        ),
        Input::Foreign(trace) => write_foreign(&args, &trace, &options, ctx),
    }
}

/// A run, or a bare trace of one; the user's model takes the place of a map that it has not.
fn write_run(args: &Args, mut run: Run, ctx: &Context) -> anyhow::Result<ExitStatus> {
    if let Some((named, gguf)) = args.trace.gguf()? {
        if run.map.is_some() {
            bail!(
                "--model: {} has the map of its model; leave the option out",
                args.run.display()
            );
        }
        traces::check_model(&args.run, run.manifest.as_ref(), &named)?;
        run.map = Some(OffsetMap::new(&gguf));
        foreign::refuse_existing(args, &[])?;
    }
    write(args, &run, ctx)
}

/// A trace of another tool: all tables if it tells every operation, else `routing`.
fn write_foreign(
    args: &Args,
    trace: &Detected,
    options: &ImportOptions,
    ctx: &Context,
) -> anyhow::Result<ExitStatus> {
    let Some(records) = trace.importer.records(&trace.source, options)? else {
        return foreign::write_routing(args, trace, options, ctx);
    };
    ctx.remark(format_args!(
        "{}: {}",
        args.run.display(),
        trace.importer.name()
    ));
    for note in &records.notes {
        ctx.remark(format_args!("  {note}"));
    }
    foreign::refuse_existing(args, &[])?;
    write(args, &records.run, ctx)
}

fn write(args: &Args, run: &Run, ctx: &Context) -> anyhow::Result<ExitStatus> {
    if !args.force {
        refuse_existing(args, run)?;
    }
    let interrupted = interrupt::flag();
    traces::remark(run, ctx)?;
    if run.map.is_none() {
        ctx.remark(format_args!(
            "{} has no gguf-map.parquet: where each expert is is not known, accesses name whole tensors; --model tells",
            args.run.display()
        ));
    }
    if let Some(remark) = run.unresolved_remark() {
        ctx.remark(remark);
    }
    let records = run.trace.size_bytes() / moe_trace::record::RECORD_SIZE as u64;
    let options = TableOptions {
        force: args.force,
        interrupted: Some(interrupted),
        ..TableOptions::default()
    };
    // Nothing is in its place before all is written.
    let mut pending = PendingTables::default();
    let mut written = Vec::new();
    if let Some(out) = &args.out {
        let (tables, summary) = with_progress(ctx, records, options, |options| {
            prepare_tables(run, out, options)
        })?;
        pending.append(tables);
        written.push((summary, out.display().to_string()));
    }
    if let Some(dataset) = &args.dataset {
        let (tables, summary) = with_progress(ctx, records, options, |options| {
            prepare_for_dataset(run, dataset, options)
        })?;
        pending.append(tables);
        written.push((summary, format!("{}, run={}", dataset.display(), run.id())));
    }
    let map = foreign::prepare_map(args, Some(run), &mut pending, ctx)?;
    pending.commit()?;
    for (summary, place) in written {
        remark(ctx, &summary, &place);
    }
    if let Some(map) = map {
        ctx.remark(format_args!("wrote {}", map.display()));
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

fn with_progress<T>(
    ctx: &Context,
    records: u64,
    options: TableOptions,
    write: impl FnOnce(TableOptions) -> Result<T, moe_trace::Error>,
) -> anyhow::Result<T> {
    let progress = Progress::items(ctx, "records", records);
    let written = write(TableOptions {
        progress: Some(&|n_records| progress.inc(n_records)),
        ..options
    });
    Ok(written?)
}

fn remark(ctx: &Context, summary: &TableSummary, place: &str) {
    ctx.remark(format_args!(
        "{}: {}, {}, {} in {place}",
        counted(summary.records, "record"),
        counted(summary.ops, "operation"),
        counted(summary.accesses, "access"),
        counted(summary.routing, "routing row"),
    ));
}
