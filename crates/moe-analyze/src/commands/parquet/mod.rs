//! `parquet`: writes the tables of a run.

mod foreign;

use std::path::PathBuf;

use anyhow::bail;
use moe_files::text::counted;
use moe_foreign::{Detected, ImportOptions, Input};
use moe_gguf::map::OffsetMap;
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

/// Convert a run to the Parquet tables ops, accesses and routing
///
/// A trace of another tool without operations yields only the table routing. With --model and --out, also
/// writes gguf-map.parquet, the offset map of the model.
#[derive(Debug, clap::Args)]
#[command(
    group = clap::ArgGroup::new("outputs").args(["out", "dataset"]).required(true).multiple(true),
    after_help = "Examples:\n  moe-analyze parquet runs/first --out tables\n  moe-analyze parquet runs/first --dataset dataset"
)]
pub struct Args {
    /// Run directory, trace.bin, or a trace of another tool
    run: PathBuf,
    /// Directory for ops.parquet, accesses.parquet and routing.parquet; --out or --dataset is required
    #[arg(long, value_name = "DIR")]
    out: Option<OutputPath>,
    /// Dataset directory to add the run to, Hive-partitioned by run (ops/run=ID/part-0.parquet)
    #[arg(long, value_name = "DIR")]
    dataset: Option<OutputPath>,
    /// Replace existing tables
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
            "{} is already a table; pass a run directory, its trace.bin, or a trace of another tool",
            args.run.display()
        ),
        Input::Foreign(trace) => write_foreign(&args, &trace, &options, ctx),
    }
}

/// Writes the tables of a run or a trace.bin. `--model` provides the map of a run without one.
fn write_run(args: &Args, mut run: Run, ctx: &Context) -> anyhow::Result<ExitStatus> {
    if let Some((named, gguf)) = args.trace.gguf()? {
        if run.map.is_some() {
            bail!(
                "--model: {} already contains the map of its model; omit the option",
                args.run.display()
            );
        }
        traces::check_model(&args.run, run.manifest.as_ref(), &named)?;
        run.map = Some(OffsetMap::new(&gguf));
        foreign::refuse_existing(args, &[])?;
    }
    write(args, &run, ctx)
}

/// Writes the tables of a trace of another tool: all tables if it contains the operations, else `routing`.
fn write_foreign(
    args: &Args,
    trace: &Detected,
    options: &ImportOptions,
    ctx: &Context,
) -> anyhow::Result<ExitStatus> {
    let Some(records) = trace.importer.records(&trace.source, options)? else {
        return foreign::write_routing(args, trace, options, ctx);
    };
    ctx.note(format_args!(
        "{}: {}",
        args.run.display(),
        trace.importer.name()
    ));
    for note in &records.notes {
        ctx.note(format_args!("  {note}"));
    }
    foreign::refuse_existing(args, &[])?;
    write(args, &records.run, ctx)
}

fn write(args: &Args, run: &Run, ctx: &Context) -> anyhow::Result<ExitStatus> {
    if !args.force {
        refuse_existing(args, run)?;
    }
    let interrupted = interrupt::flag();
    traces::print_warnings(run, ctx)?;
    if run.map.is_none() {
        ctx.note(format_args!(
            "warning: {} has no gguf-map.parquet, so accesses are to entire expert tensors; pass --model to split them by expert",
            args.run.display()
        ));
    }
    if let Some(warning) = run.unresolved_warning() {
        ctx.note(warning);
    }
    let records = run.trace.size_bytes() / moe_trace::record::RECORD_SIZE as u64;
    let options = TableOptions {
        force: args.force,
        interrupted: Some(interrupted),
        ..TableOptions::default()
    };
    // The tables appear together, when all are complete.
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
        note_tables(ctx, &summary, &place);
    }
    if let Some(map) = map {
        ctx.note(format_args!("wrote {}", map.display()));
    }
    Ok(ExitStatus::Done)
}

/// Rejects existing outputs before anything is written.
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
        Some(path) => {
            moe_files::check_link(&path)?;
            Err(moe_trace::Error::Exists { path })
        }
        None => Ok(()),
    }
}

/// Runs `write` with a progress bar over `records`.
pub fn with_progress<T>(
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

fn note_tables(ctx: &Context, summary: &TableSummary, place: &str) {
    ctx.note(format_args!(
        "{}: {}, {}, {} in {place}",
        counted(summary.records, "record"),
        counted(summary.ops, "operation"),
        counted(summary.accesses, "access"),
        counted(summary.routing, "routing row"),
    ));
}
