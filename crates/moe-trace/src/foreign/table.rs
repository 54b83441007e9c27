//! The table `routing` of a foreign trace.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use arrow::array::{
    ArrayRef, Float32Builder, Int32Builder, RecordBatch, UInt16Builder, UInt32Builder,
    UInt64Builder,
};
use arrow::error::ArrowError;
use parquet::arrow::ArrowWriter;
use parquet::errors::ParquetError;

use super::output::{Sink, SinkError, Summary};
use super::rows::{CountRow, RoutingRow};
use crate::error::Error;
use crate::files::{MadeDirectories, PendingFile};
use crate::manifest::Model;
use crate::parquet_file::{SCHEMA_KEY, dictionary, key_value, properties};
use crate::tables::{
    EXPERT_BYTES_KEY, FORMAT_KEY, LANE_NAMES, MODEL_KEY, PHASE_NAMES, READ_ROUTING, RUN_ID_KEY,
};

/// Rows that are held as columns at a time.
const BATCH_ROWS: usize = 8 * 1024;
/// Rows of a row group, which the writer holds encoded.
const GROUP_ROWS: usize = 512 * 1024;

/// Writes rows to a Parquet table under a temporary name; memory does not grow with them.
pub struct RoutingTable {
    pending: PendingFile,
    directories: MadeDirectories,
    writer: ArrowWriter<File>,
    columns: Columns,
}

#[derive(Default)]
struct Columns {
    n_rows: usize,
    token_id: UInt32Builder,
    sequence_id: UInt32Builder,
    phase: Int32Builder,
    layer_id: UInt16Builder,
    slot: UInt16Builder,
    expert_id: UInt32Builder,
    weight: Float32Builder,
    lane: Int32Builder,
    timestamp_ns: UInt64Builder,
}

impl RoutingTable {
    /// Creates the table's file, its directory if need be. `run_id` names the trace in datasets.
    ///
    /// # Errors
    /// [`Error::Exists`] unless `force`; the file cannot be created.
    pub fn create(path: &Path, run_id: &str, force: bool) -> Result<Self, Error> {
        let mut directories = MadeDirectories::default();
        if let Some(dir) = path.parent() {
            directories.create(dir)?;
        }
        let (pending, file) = PendingFile::create(path, force)?;
        let metadata = vec![
            key_value(SCHEMA_KEY, "moe-analyze.routing.v1"),
            key_value(RUN_ID_KEY, run_id),
        ];
        let writer = ArrowWriter::try_new(
            file,
            READ_ROUTING.clone(),
            Some(properties(metadata, &["timestamp_ns"])),
        )
        .map_err(Error::writing_parquet(path))?;
        Ok(Self {
            pending,
            directories,
            writer,
            columns: Columns::default(),
        })
    }

    /// Puts the table in its place, with what `summary` says of its format and model; returns its rows.
    ///
    /// # Errors
    /// The file cannot be written; then it is as before.
    pub fn finish(mut self, summary: &Summary) -> Result<u64, Error> {
        let path = self.pending.path().to_owned();
        self.write_batch().map_err(Error::writing_parquet(&path))?;
        let json = |value: serde_json::Result<String>| value.map_err(Error::parquet(&path));
        let facts = &summary.facts;
        let model = Model {
            path: facts.model.clone().unwrap_or_default(),
            arch: facts.arch.clone().unwrap_or_default(),
            n_layer: facts.n_layer.unwrap_or(0),
            n_expert: facts.n_expert.unwrap_or(0),
            n_expert_used: facts.n_expert_used.unwrap_or(0),
            ..Model::default()
        };
        let bytes: BTreeMap<String, u64> = facts
            .expert_bytes
            .iter()
            .map(|(layer, &bytes)| (layer.to_string(), bytes))
            .collect();
        let mut metadata = vec![key_value(FORMAT_KEY, summary.format)];
        if model != Model::default() {
            metadata.push(key_value(MODEL_KEY, json(serde_json::to_string(&model))?));
        }
        if !bytes.is_empty() {
            metadata.push(key_value(
                EXPERT_BYTES_KEY,
                json(serde_json::to_string(&bytes))?,
            ));
        }
        for entry in metadata {
            self.writer.append_key_value_metadata(entry);
        }
        self.writer.close().map_err(Error::writing_parquet(&path))?;
        self.pending.commit()?;
        self.directories.keep();
        Ok(summary.rows)
    }

    fn write_batch(&mut self) -> Result<(), ParquetError> {
        if self.columns.n_rows > 0 {
            let batch = self.columns.take()?;
            self.writer.write(&batch)?;
            if self.writer.in_progress_rows() >= GROUP_ROWS {
                self.writer.flush()?;
            }
        }
        Ok(())
    }
}

impl Sink for RoutingTable {
    fn routing(&mut self, row: &RoutingRow) -> Result<(), SinkError> {
        self.columns.push(row);
        if self.columns.n_rows >= BATCH_ROWS {
            let written = self.write_batch();
            written.map_err(Error::writing_parquet(self.pending.path()))?;
        }
        Ok(())
    }

    fn count(&mut self, _: &CountRow) -> Result<(), SinkError> {
        Err(SinkError::NeedsOrder)
    }
}

impl Columns {
    fn push(&mut self, row: &RoutingRow) {
        self.n_rows += 1;
        self.token_id.append_value(row.token_id);
        self.sequence_id.append_option(row.sequence_id);
        self.phase
            .append_option(row.phase.map(|phase| phase.number().into()));
        self.layer_id.append_value(row.layer_id);
        self.slot.append_value(row.slot);
        self.expert_id.append_value(row.expert_id);
        self.weight.append_option(row.weight);
        self.lane.append_option(row.lane.map(i32::from));
        self.timestamp_ns.append_option(row.timestamp_ns);
    }

    fn take(&mut self) -> Result<RecordBatch, ArrowError> {
        self.n_rows = 0;
        let columns: Vec<ArrayRef> = vec![
            Arc::new(self.token_id.finish()),
            Arc::new(self.sequence_id.finish()),
            dictionary(self.phase.finish(), &PHASE_NAMES),
            Arc::new(self.layer_id.finish()),
            Arc::new(self.slot.finish()),
            Arc::new(self.expert_id.finish()),
            Arc::new(self.weight.finish()),
            dictionary(self.lane.finish(), &LANE_NAMES),
            Arc::new(self.timestamp_ns.finish()),
        ];
        RecordBatch::try_new(READ_ROUTING.clone(), columns)
    }
}
