//! The table `routing` of a trace that tells nothing else.

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

/// Writes `routing`, and beside it the map of the model if the user named one.
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

    // Nothing is in its place before all is written.
    let mut pending = PendingTables::default();
    let mut n_rows = 0;
    for (i, place) in places.iter().enumerate() {
        let mut sink = Interruptible {
            table: RoutingTable::create(place, &run_id, args.force)?,
            interrupted,
            place,
        };
        let summary = import(trace.importer, &trace.source, options, &mut sink)?;
        let (table, rows) = sink.table.complete(summary.format, &summary.facts)?;
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
        ctx.remark(format_args!(
            "{n_rows} routing rows in {}; ops and accesses are not told",
            place.display()
        ));
    }
    if let Some(map) = map {
        ctx.remark(format_args!("wrote {}", map.display()));
    }
    Ok(ExitStatus::Done)
}

/// Lets the commit remove the tables that this trace does not fill and an earlier `parquet` left: they are of another trace.
fn remove_older(args: &Args, pending: &mut PendingTables) {
    let out = args.out.iter().filter(|_| args.force);
    for (table, path) in out.flat_map(|out| TABLES.into_iter().zip(table_paths(out))) {
        if table != "routing" && has_schema(&path, &format!("moe-analyze.{table}.v1")) {
            pending.remove(path);
        }
    }
}

/// Lets the commit remove a map that is not known to be of the model of the new tables: readers would join it with them. The
/// map in the directory of a run belongs to the run.
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
    ctx.remark(format_args!(
        "{} is removed: it is not known to be the map of the model of these tables; --model writes their map",
        path.display()
    ));
    pending.remove(path);
}

/// Whether a map is of the model of a run: equal to the map of the run, or of the same files.
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

/// A table that takes no more once the user has pressed Ctrl-C.
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

/// Looks at all outputs before the first one is written.
pub(super) fn refuse_existing(args: &Args, places: &[PathBuf]) -> Result<(), moe_trace::Error> {
    let map = map_path(args);
    let mut paths = places.iter().chain(&map);
    match paths.find(|path| !args.force && path.symlink_metadata().is_ok()) {
        Some(path) => Err(moe_trace::Error::Exists { path: path.clone() }),
        None => Ok(()),
    }
}

/// Where the map of the model goes, if the user named one.
fn map_path(args: &Args) -> Option<PathBuf> {
    let out = args.out.as_ref().filter(|_| args.trace.names_model())?;
    Some(out.join(map_table::FILE_NAME))
}

/// Writes the map of the model, with which the bytes of every expert can be joined to the tables, and returns its path.
/// Without a model the commit removes the map of an earlier one; `run` is the run that the tables are of, if it is one.
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
