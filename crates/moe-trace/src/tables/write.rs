//! Writing the tables of a run: chunks of the trace become row groups, side by side, and go to the files in order.
//!
//! A worker takes the next chunk, encodes it to one row group of every table, waits for its turn and appends them. Memory is
//! bounded by the chunks being worked on, one a worker, whatever the trace's length.

use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use moe_files::NewDirectories;

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
use crate::table_fault::TableFault;

/// How to write tables.
#[derive(Clone, Copy, Default)]
pub struct TableOptions<'a> {
    /// Replace tables that are there.
    pub force: bool,
    /// Threads; `None` = as many as the machine has processors.
    pub threads: Option<NonZero<usize>>,
    /// Set to stop the work; then nothing is written.
    pub interrupted: Option<&'a AtomicBool>,
    /// Told how many records each step forward had.
    pub progress: Option<&'a (dyn Fn(u64) + Sync)>,
}

/// What was written.
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

/// Writes `ops.parquet`, `accesses.parquet` and `routing.parquet` into `dir`, which is created if need be.
///
/// After an error none of them has changed.
pub fn write_tables(
    run: &Run,
    dir: &Path,
    options: TableOptions<'_>,
) -> Result<TableSummary, Error> {
    write(prepare_tables(run, dir, options)?)
}

/// As [`write_tables`], but the directory's tables are as before until those that are returned are committed.
pub fn prepare_tables(
    run: &Run,
    dir: &Path,
    options: TableOptions<'_>,
) -> Result<(PendingTables, TableSummary), Error> {
    prepare(run, table_paths(dir), options)
}

/// Adds a run to a dataset: `DIR/ops/run=ID/part-0.parquet` and so on, where `ID` is [`Run::id`].
///
/// After an error the dataset has not changed.
pub fn add_to_dataset(
    run: &Run,
    dir: &Path,
    options: TableOptions<'_>,
) -> Result<TableSummary, Error> {
    write(prepare_for_dataset(run, dir, options)?)
}

/// As [`add_to_dataset`], but the dataset is as before until the tables that are returned are committed.
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

/// Where [`write_tables`] puts the tables, in the order of [`TABLES`].
pub fn table_paths(dir: &Path) -> [PathBuf; 3] {
    TABLES.map(|table| dir.join(format!("{table}.parquet")))
}

/// Where [`add_to_dataset`] puts the tables, in the order of [`TABLES`].
pub fn dataset_paths(run: &Run, dir: &Path) -> [PathBuf; 3] {
    let partition = format!("run={}", run.id());
    TABLES.map(|table| dir.join(table).join(&partition).join("part-0.parquet"))
}

/// `paths` are those of [`TABLES`].
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

    let job = Job {
        context,
        encoders: [ops_encoders, accesses_encoders, routing_encoders],
        chunks: Mutex::new(Chunks::new(
            run.trace.all_records(),
            run.ops().number("MUL_MAT_ID"),
        )),
        output: Mutex::new(Output {
            tables: [ops, accesses, routing],
            next: 0,
            records: 0,
            failed: None,
        }),
        turn: Condvar::new(),
        progress: options.progress,
        interrupted: options.interrupted,
    };
    let threads = options
        .threads
        .or_else(|| std::thread::available_parallelism().ok())
        .map_or(1, NonZero::get);
    std::thread::scope(|scope| {
        for _ in 1..threads {
            scope.spawn(|| job.work());
        }
        job.work();
    });

    let output = job
        .output
        .into_inner()
        .unwrap_or_else(PoisonError::into_inner);
    if let Some(error) = output.failed {
        return Err(error);
    }
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

/// What the workers share.
struct Job<'a> {
    context: Context<'a>,
    encoders: [EncoderFactory; 3],
    chunks: Mutex<Chunks<'a>>,
    output: Mutex<Output>,
    /// Signals that `output.next` or `output.failed` has changed.
    turn: Condvar,
    progress: Option<&'a (dyn Fn(u64) + Sync)>,
    interrupted: Option<&'a AtomicBool>,
}

struct Output {
    tables: [Table; 3],
    /// The chunk whose turn it is.
    next: u64,
    records: u64,
    failed: Option<Error>,
}

impl<'a> Job<'a> {
    /// Works on chunks until there are no more, or one has failed.
    fn work(&self) {
        let _guard = StopOnPanic(self);
        loop {
            let chunk = lock(&self.chunks).next();
            let Some(chunk) = chunk else { return };
            let (index, n_records) = (chunk.index, chunk.n_records);
            let row_groups = self.encode(chunk);
            let mut output = lock(&self.output);
            while output.next != index && output.failed.is_none() {
                output = self
                    .turn
                    .wait(output)
                    .unwrap_or_else(PoisonError::into_inner);
            }
            if output.failed.is_some() {
                return;
            }
            let row_groups = match self.interrupted {
                Some(interrupted) if interrupted.load(Ordering::Relaxed) => {
                    let path = output.tables[0].path().to_owned();
                    Err(Error::Interrupted { path })
                }
                _ => row_groups,
            };
            match row_groups.and_then(|row_groups| output.append(row_groups)) {
                Ok(()) => {
                    output.next += 1;
                    output.records += n_records;
                }
                Err(error) => output.failed = Some(error),
            }
            drop(output);
            self.turn.notify_all();
            if let Some(progress) = self.progress {
                progress(n_records);
            }
        }
    }

    /// One row group of each table.
    fn encode(&self, chunk: Chunk<'a>) -> Result<[RowGroup; 3], Error> {
        let parquet = Error::writing_table(self.context.trace);
        let [ops, accesses, routing] = &self.encoders;
        let mut ops = ops.encoder(OpRows::default()).map_err(&parquet)?;
        let mut accesses = accesses.encoder(AccessRows::default()).map_err(&parquet)?;
        let mut routing = routing
            .encoder(RoutingRows::new(chunk.routing))
            .map_err(&parquet)?;
        for (op_index, operation) in (chunk.first_op..).zip(chunk.operations) {
            for (record, log) in (operation.first_record()..).zip(operation.records()) {
                log.check_readable()
                    .map_err(|fault| self.context.record_error(record, fault))?;
            }
            ops.push(op_index, &operation, &self.context)?;
            accesses.push(op_index, &operation, &self.context)?;
            routing.push(op_index, &operation, &self.context)?;
        }
        Ok([
            ops.finish().map_err(&parquet)?,
            accesses.finish().map_err(&parquet)?,
            routing.finish().map_err(&parquet)?,
        ])
    }
}

/// Lets the other workers stop where one panics, instead of waiting for its chunk for ever.
struct StopOnPanic<'j, 'a>(&'j Job<'a>);

impl Drop for StopOnPanic<'_, '_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let failed = Error::table(self.0.context.trace)(TableFault::WorkerPanicked);
            lock(&self.0.output).failed = Some(failed);
            self.0.turn.notify_all();
        }
    }
}

impl Output {
    fn append(&mut self, row_groups: [RowGroup; 3]) -> Result<(), Error> {
        for (table, row_group) in self.tables.iter_mut().zip(row_groups) {
            table.append(row_group)?;
        }
        Ok(())
    }
}

/// A worker that panicked left nothing half done that another could see.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
