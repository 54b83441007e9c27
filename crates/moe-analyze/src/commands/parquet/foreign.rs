//! The table `routing` of a trace without operations.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use moe_foreign::{Detected, ImportOptions, import};
use moe_gguf::map::OffsetMap;
use moe_trace::tables::{
    PendingTables, RoutingTable, SCHEMA_KEY, TABLES, TableMetadata, table_paths,
};
use moe_trace::{CountRow, RoutingRow, Run, Sink, SinkError, TRACE_FILE, map_table};

use super::Args;
use crate::context::Context;
use crate::exit_status::ExitStatus;
use crate::interrupt;
use crate::layout::prepare_map_table;
use crate::traces;

/// Writes `routing`, and the map of the model if `--model` is given.
pub(super) fn write_routing(
    args: &Args,
    trace: &Detected,
    options: &ImportOptions,
    ctx: &Context,
) -> anyhow::Result<ExitStatus> {
    let run_id = trace.run_id()?;
    let mut places = Vec::new();
    if let Some(out) = &args.out {
        places.push(out.join("routing.parquet"));
    }
    if let Some(dataset) = &args.dataset {
        let run = format!("run={run_id}");
        places.push(dataset.join("routing").join(run).join("part-0.parquet"));
    }
    refuse_existing(args, &places)?;
    let interrupted = interrupt::flag();

    // The tables appear together, when all are complete.
    let mut pending = PendingTables::default();
    let mut n_rows = 0;
    for (i, place) in places.iter().enumerate() {
        let mut sink = Interruptible {
            table: RoutingTable::create(place, &run_id, args.force)?,
            interrupted,
            place,
        };
        let summary = import(trace.importer, &trace.source, options, &mut sink)?;
        let (table, rows) = sink.table.complete(summary.format, &summary.model_info)?;
        pending.append(table);
        n_rows = rows;
        if i == 0 {
            traces::report_import(ctx, &args.run, &summary);
        }
    }
    let map = prepare_map(args, None, &mut pending, ctx)?;
    remove_older(args, &mut pending);
    pending.commit()?;
    for place in &places {
        ctx.note(format_args!(
            "wrote {n_rows} routing rows to {}; the trace contains no operations, so there are no tables ops and accesses",
            place.display()
        ));
    }
    if let Some(map) = map {
        ctx.note(format_args!("wrote {}", map.display()));
    }
    Ok(ExitStatus::Done)
}

/// Marks for removal the tables of an earlier trace that this trace does not replace.
fn remove_older(args: &Args, pending: &mut PendingTables) {
    let out = args.out.iter().filter(|_| args.force);
    for (table, path) in out.flat_map(|out| TABLES.into_iter().zip(table_paths(out))) {
        if table != "routing" && has_schema(&path, &format!("moe-analyze.{table}.v1")) {
            pending.remove(path);
        }
    }
}

/// Marks an existing map for removal if it may be of another model than the new tables: readers would join it with them. A map in a
/// run directory belongs to the run and stays.
fn remove_older_map(args: &Args, run: Option<&Run>, pending: &mut PendingTables, ctx: &Context) {
    let Some(out) = args.out.as_ref().filter(|_| args.force) else {
        return;
    };
    let path = out.join(map_table::FILE_NAME);
    if out.join(TRACE_FILE).exists()
        || !has_schema(&path, map_table::SCHEMA)
        || run.is_some_and(|run| is_map_of(&path, run))
    {
        return;
    }
    ctx.note(format_args!(
        "warning: removing {}: it may be the map of another model; --model writes the map of these tables",
        path.display()
    ));
    pending.remove(path);
}

/// Returns whether a map is of the model of a run: it equals the run's map, or has the same files.
fn is_map_of(path: &Path, run: &Run) -> bool {
    match (&run.map, &run.manifest) {
        (Some(map), _) => map_table::read(path).is_ok_and(|older| older == *map),
        (None, Some(manifest)) => {
            let files = &manifest.model.files;
            let identity = map_table::identity(path);
            !files.is_empty() && identity.is_ok_and(|identity| identity.files == *files)
        }
        (None, None) => false,
    }
}

fn has_schema(path: &Path, schema: &str) -> bool {
    TableMetadata::read(path).is_ok_and(|metadata| metadata.value(SCHEMA_KEY) == Some(schema))
}

/// A table that returns an error after an interrupt.
struct Interruptible<'a> {
    table: RoutingTable,
    interrupted: &'a AtomicBool,
    place: &'a Path,
}

impl Sink for Interruptible<'_> {
    fn routing(&mut self, row: &RoutingRow) -> Result<(), SinkError> {
        if self.interrupted.load(Ordering::Relaxed) {
            return Err(SinkError::from(moe_trace::Error::Interrupted {
                path: self.place.to_owned(),
            }));
        }
        self.table.routing(row)
    }

    fn count(&mut self, row: &CountRow) -> Result<(), SinkError> {
        self.table.count(row)
    }
}

/// Rejects existing outputs before anything is written, unless `--force` is given.
pub(super) fn refuse_existing(args: &Args, places: &[PathBuf]) -> Result<(), moe_trace::Error> {
    let map = map_path(args);
    let mut paths = places.iter().chain(&map);
    match paths.find(|path| !args.force && path.symlink_metadata().is_ok()) {
        Some(path) => {
            moe_files::check_link(path)?;
            Err(moe_trace::Error::Exists { path: path.clone() })
        }
        None => Ok(()),
    }
}

/// Returns the path of the map to write, if `--model` is given.
fn map_path(args: &Args) -> Option<PathBuf> {
    let out = args.out.as_ref().filter(|_| args.trace.has_model())?;
    Some(out.join(map_table::FILE_NAME))
}

/// Writes the map of the model, which can be joined with the tables, and returns its path. Without `--model`, marks the map of an
/// earlier model for removal. `run` is the run of the tables, if they are of a run.
pub(super) fn prepare_map(
    args: &Args,
    run: Option<&Run>,
    pending: &mut PendingTables,
    ctx: &Context,
) -> anyhow::Result<Option<PathBuf>> {
    let (Some(path), Some((_, gguf))) = (map_path(args), args.trace.gguf()?) else {
        remove_older_map(args, run, pending, ctx);
        return Ok(None);
    };
    pending.push(prepare_map_table(
        &gguf,
        &OffsetMap::new(&gguf),
        &path,
        args.force,
    )?);
    Ok(Some(path))
}
