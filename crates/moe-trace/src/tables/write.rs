//! Writing the tables of a run. Chunks of the trace are encoded to row groups in parallel and appended in order.
//!
//! As many chunks as there are threads are encoded to one row group of each table, while the row groups of the previous
//! chunks are written. Memory is bounded by two chunks for each thread, independent of the length of the trace.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use moe_files::NewDirectories;
use rayon::prelude::*;

use super::accesses::AccessRows;
use super::chunks::{Chunk, Chunks};
use super::ops::OpRows;
use super::pending::PendingTables;
use super::routing::RoutingRows;
use super::rows::Context;
use super::table::{EncoderFactory, RowGroup, Table};
use super::{MODEL_KEY, RUN_ID_KEY, TABLES};
use crate::accesses::FileAccesses;
use crate::error::Error;
use crate::parquet_file::{SCHEMA_KEY, key_value};
use crate::run::Run;

/// Options for writing tables. The work runs on the rayon pool of the calling thread.
#[derive(Clone, Copy, Default)]
pub struct TableOptions<'a> {
    /// Replace existing tables. Without it, an existing table is an error.
    pub force: bool,
    /// Another thread sets it to `true` to stop the work. The result is then [`Error::Interrupted`], and no file changes.
    pub interrupted: Option<&'a AtomicBool>,
    /// Called after each step with the number of records that the step completed.
    pub progress: Option<&'a (dyn Fn(u64) + Sync)>,
}

/// Numbers of records read and rows written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TableSummary {
    /// Records read.
    pub records: u64,
    /// Rows of `ops`.
    pub ops: u64,
    /// Rows of `accesses`.
    pub accesses: u64,
    /// Rows of `routing`.
    pub routing: u64,
}

/// Writes `ops.parquet`, `accesses.parquet` and `routing.parquet` to `dir`, which is created if necessary.
///
/// # Errors
/// [`Error::Exists`] for an existing table without [`TableOptions::force`]; [`Error::Record`] for an invalid record;
/// [`Error::Interrupted`]; other variants if a file cannot be written. After an error, none of the tables has changed.
pub fn write_tables(
    run: &Run,
    dir: &Path,
    options: TableOptions<'_>,
) -> Result<TableSummary, Error> {
    write(prepare_tables(run, dir, options)?)
}

/// Like [`write_tables`], but existing tables do not change until the returned tables are committed.
///
/// # Errors
/// Those of [`write_tables`].
pub fn prepare_tables(
    run: &Run,
    dir: &Path,
    options: TableOptions<'_>,
) -> Result<(PendingTables, TableSummary), Error> {
    prepare(run, table_paths(dir), options)
}

/// Adds a run to a dataset: `DIR/ops/run=ID/part-0.parquet` etc., where `ID` is [`Run::id`].
///
/// # Errors
/// Those of [`write_tables`]. After an error, the dataset has not changed.
pub fn add_to_dataset(
    run: &Run,
    dir: &Path,
    options: TableOptions<'_>,
) -> Result<TableSummary, Error> {
    write(prepare_for_dataset(run, dir, options)?)
}

/// Like [`add_to_dataset`], but the dataset does not change until the returned tables are committed.
///
/// # Errors
/// Those of [`write_tables`].
pub fn prepare_for_dataset(
    run: &Run,
    dir: &Path,
    options: TableOptions<'_>,
) -> Result<(PendingTables, TableSummary), Error> {
    prepare(run, dataset_paths(run, dir), options)
}

fn write((tables, summary): (PendingTables, TableSummary)) -> Result<TableSummary, Error> {
    tables.commit()?;
    Ok(summary)
}

/// Paths of the tables that [`write_tables`] writes, in the order of [`TABLES`].
pub fn table_paths(dir: &Path) -> [PathBuf; 3] {
    TABLES.map(|table| dir.join(format!("{table}.parquet")))
}

/// Paths of the tables that [`add_to_dataset`] writes, in the order of [`TABLES`].
pub fn dataset_paths(run: &Run, dir: &Path) -> [PathBuf; 3] {
    let partition = format!("run={}", run.id());
    TABLES.map(|table| dir.join(table).join(&partition).join("part-0.parquet"))
}

/// Writes the tables to temporary files for `paths`, in the order of [`TABLES`].
fn prepare(
    run: &Run,
    paths: [PathBuf; 3],
    options: TableOptions<'_>,
) -> Result<(PendingTables, TableSummary), Error> {
    let manifest = run.manifest.as_ref();
    let model = manifest.map(|manifest| serde_json::to_string(&manifest.model));
    let model = model.transpose().map_err(Error::json("table", &paths[0]))?;
    let metadata = |table: &str| {
        let mut metadata = vec![
            key_value(SCHEMA_KEY, format!("moe-analyze.{table}.v1")),
            key_value(RUN_ID_KEY, run.id()),
        ];
        metadata.extend(model.as_ref().map(|model| key_value(MODEL_KEY, model)));
        metadata
    };
    let context = Context {
        trace: run.trace.path(),
        ops: run.ops(),
        accesses: FileAccesses::new(run.map.as_ref()),
        passes: run.passes(),
    };
    let mut directories = NewDirectories::default();
    let (ops, ops_encoders) = Table::create::<OpRows>(
        &paths[0],
        metadata(TABLES[0]),
        options.force,
        &mut directories,
    )?;
    let (accesses, accesses_encoders) = Table::create::<AccessRows>(
        &paths[1],
        metadata(TABLES[1]),
        options.force,
        &mut directories,
    )?;
    let (routing, routing_encoders) = Table::create::<RoutingRows<'_>>(
        &paths[2],
        metadata(TABLES[2]),
        options.force,
        &mut directories,
    )?;

    let encoders = [ops_encoders, accesses_encoders, routing_encoders];
    let chunks = Chunks::new(run.trace.all_records(), run.ops().number("MUL_MAT_ID"));
    let mut output = Output {
        tables: [ops, accesses, routing],
        records: 0,
        options,
    };
    write_chunks(
        chunks,
        |chunk| encode(chunk, &context, &encoders),
        &mut output,
    )?;

    let [ops, accesses, routing] = output.tables.map(Table::complete);
    let ((ops, n_ops), (accesses, n_accesses), (routing, n_routing)) = (ops?, accesses?, routing?);
    let summary = TableSummary {
        records: output.records,
        ops: n_ops,
        accesses: n_accesses,
        routing: n_routing,
    };
    let tables = PendingTables::new(vec![ops, accesses, routing], directories);
    Ok((tables, summary))
}

/// The row groups of a chunk, one for each table, and its number of records.
type Encoded = ([RowGroup; 3], u64);

/// Encodes the chunks and appends their row groups in order.
fn write_chunks<'a>(
    mut chunks: Chunks<'a>,
    encode: impl Fn(Chunk<'a>) -> Result<Encoded, Error> + Sync,
    output: &mut Output<'_>,
) -> Result<(), Error> {
    let n_threads = rayon::current_num_threads();
    let mut encoded = Vec::new();
    loop {
        let batch: Vec<Chunk> = chunks.by_ref().take(n_threads).collect();
        let (next, appended) = rayon::join(
            || batch.into_par_iter().map(&encode).collect::<Vec<_>>(),
            || {
                encoded
                    .into_iter()
                    .try_for_each(|chunk| output.append(chunk?))
            },
        );
        appended?;
        if next.is_empty() {
            return Ok(());
        }
        encoded = next;
    }
}

/// Encodes a chunk to a row group of each table.
fn encode<'a>(
    chunk: Chunk<'a>,
    context: &Context<'a>,
    [ops, accesses, routing]: &[EncoderFactory; 3],
) -> Result<Encoded, Error> {
    let parquet = Error::writing_table(context.trace);
    let mut ops = ops.encoder(OpRows::default()).map_err(&parquet)?;
    let mut accesses = accesses.encoder(AccessRows::default()).map_err(&parquet)?;
    let mut routing = routing
        .encoder(RoutingRows::new(chunk.routing))
        .map_err(&parquet)?;
    for (op_index, operation) in (chunk.first_op..).zip(chunk.operations) {
        for (record, log) in (operation.first_record()..).zip(operation.records()) {
            log.check_readable()
                .map_err(|fault| context.record_error(record, fault))?;
        }
        ops.push(op_index, &operation, context)?;
        accesses.push(op_index, &operation, context)?;
        routing.push(op_index, &operation, context)?;
    }
    let row_groups = [
        ops.finish().map_err(&parquet)?,
        accesses.finish().map_err(&parquet)?,
        routing.finish().map_err(&parquet)?,
    ];
    Ok((row_groups, chunk.n_records))
}

struct Output<'o> {
    tables: [Table; 3],
    records: u64,
    options: TableOptions<'o>,
}

impl Output<'_> {
    fn append(&mut self, (row_groups, n_records): Encoded) -> Result<(), Error> {
        let interrupted = self.options.interrupted;
        if interrupted.is_some_and(|flag| flag.load(Ordering::Relaxed)) {
            let path = self.tables[0].path().to_owned();
            return Err(Error::Interrupted { path });
        }
        for (table, row_group) in self.tables.iter_mut().zip(row_groups) {
            table.append(row_group)?;
        }
        self.records += n_records;
        if let Some(progress) = self.options.progress {
            progress(n_records);
        }
        Ok(())
    }
}
