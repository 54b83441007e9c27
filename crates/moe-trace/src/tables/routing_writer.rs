//! Writing the table `routing` from a stream of rows.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;

use moe_files::{AtomicFile, NewDirectories};
use parquet::arrow::ArrowWriter;
use parquet::errors::ParquetError;

use super::pending::PendingTables;
use super::routing::{Columns, READ_ROUTING};
use super::{EXPERT_BYTES_KEY, FORMAT_KEY, MODEL_KEY, RUN_ID_KEY};
use crate::error::Error;
use crate::manifest::Model;
use crate::model_info::ModelInfo;
use crate::parquet_file::{SCHEMA_KEY, key_value, properties};
use crate::sink::{CountRow, RoutingRow, Sink, SinkError};

/// Rows of a batch.
const BATCH_ROWS: usize = 8 * 1024;
/// Rows of a row group, which the writer keeps encoded in memory.
const GROUP_ROWS: usize = 512 * 1024;

/// Writes rows to a Parquet table under a temporary name, in bounded memory.
pub struct RoutingTable {
    /// Writes to a second handle, because `ArrowWriter::into_inner` hides why the last write failed.
    writer: ArrowWriter<File>,
    file: AtomicFile,
    /// Dropped after the file, which is inside.
    directories: NewDirectories,
    columns: Columns,
    n_rows: u64,
}

impl RoutingTable {
    /// Creates the table's file and, if necessary, its directory. `run_id` is the id of the trace in datasets.
    ///
    /// # Errors
    /// [`Error::Exists`] unless `force` is set; the file cannot be created.
    pub fn create(path: &Path, run_id: &str, force: bool) -> Result<Self, Error> {
        let mut directories = NewDirectories::default();
        if let Some(dir) = path.parent() {
            directories.create(dir)?;
        }
        let file = AtomicFile::create(path, force)?;
        let metadata = vec![
            key_value(SCHEMA_KEY, "moe-analyze.routing.v1"),
            key_value(RUN_ID_KEY, run_id),
        ];
        let writer = ArrowWriter::try_new(
            file.try_clone()?,
            READ_ROUTING.clone(),
            Some(properties(metadata, &["timestamp_ns"])),
        )
        .map_err(Error::writing_table(path))?;
        Ok(Self {
            writer,
            file,
            directories,
            columns: Columns::default(),
            n_rows: 0,
        })
    }

    /// Completes the table and returns it with its number of rows. `format` is the name of the original format, `model_info` are the
    /// known parameters of the model.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn complete(
        mut self,
        format: &str,
        model_info: &ModelInfo,
    ) -> Result<(PendingTables, u64), Error> {
        let path = self.file.path().to_owned();
        self.write_batch().map_err(Error::writing_table(&path))?;
        let json = |value: serde_json::Result<String>| value.map_err(Error::json("table", &path));
        let model = Model {
            path: model_info.model.clone().unwrap_or_default(),
            arch: model_info.arch.clone().unwrap_or_default(),
            n_layer: model_info.n_layer.unwrap_or(0),
            n_nextn_layer: model_info.n_nextn_layer,
            n_expert: model_info.n_expert.unwrap_or(0),
            n_expert_used: model_info.n_expert_used.unwrap_or(0),
            ..Model::default()
        };
        let bytes: BTreeMap<String, u64> = model_info
            .expert_bytes
            .iter()
            .map(|(layer, &bytes)| (layer.to_string(), bytes))
            .collect();
        let mut metadata = vec![key_value(FORMAT_KEY, format)];
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
        self.writer.close().map_err(Error::writing_table(&path))?;
        let tables = PendingTables::new(vec![self.file], self.directories);
        Ok((tables, self.n_rows))
    }

    fn write_batch(&mut self) -> Result<(), ParquetError> {
        if self.columns.len() > 0 {
            let batch = self.columns.take(&READ_ROUTING)?;
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
        let columns = &mut self.columns;
        columns.token_id.append_value(row.token_id.0);
        columns.sequence_id.append_option(row.sequence_id);
        columns
            .phase
            .append_option(row.phase.map(|phase| phase.number().into()));
        columns.layer_id.append_value(row.layer_id.0);
        columns.slot.append_value(row.slot);
        columns.expert_id.append_value(row.expert_id.0);
        columns.weight.append_option(row.weight);
        columns.lane.append_option(row.lane.map(i32::from));
        columns.timestamp_ns.append_option(row.timestamp_ns);
        self.n_rows += 1;
        if columns.len() >= BATCH_ROWS {
            let written = self.write_batch();
            written.map_err(|error| Error::writing_table(self.file.path())(error))?;
        }
        Ok(())
    }

    fn count(&mut self, _: &CountRow) -> Result<(), SinkError> {
        Err(SinkError::NeedsOrder)
    }
}
