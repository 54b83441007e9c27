//! [`Input`]: reads run directories, Parquet tables and foreign formats as routing rows.

use std::path::{Path, PathBuf};

use moe_trace::record::{RECORD_SIZE, lane};
use moe_trace::tables::{EXPERT_BYTES_KEY, MODEL_KEY, TableMetadata, read_routing};
use moe_trace::{ExpertId, LayerId, ModelInfo, RoutingRow, Run, Sink, TokenId};

use crate::error::ForeignError;
use crate::output::{Output, Summary};
use crate::source::Source;
use crate::{Detected, ImportOptions, Location, import};

/// A trace in any supported format, which can be read repeatedly.
pub enum Input {
    /// A run directory, or a `trace.bin` without one.
    Run(Box<Run>),
    /// A routing table: a Parquet file, a directory that contains one, or a dataset.
    Tables(PathBuf),
    /// A trace of another tool.
    Foreign(Detected),
}

impl Input {
    /// Reads the complete trace into `sink`.
    ///
    /// # Errors
    /// The same as [`import`].
    pub fn read(
        &self,
        options: &ImportOptions,
        sink: &mut dyn Sink,
    ) -> Result<Summary, ForeignError> {
        match self {
            Self::Foreign(Detected { importer, source }) => {
                import(*importer, source, options, sink)
            }
            Self::Run(run) => {
                let source = Source::file(run.trace.path());
                let mut output = Output::new("run", &source, options, sink)?;
                read_run(run, &mut output)?;
                output.finish()
            }
            Self::Tables(path) => {
                let source = Source::file(path);
                let mut output = Output::new("tables", &source, options, sink)?;
                read_tables(path, &mut output)?;
                output.finish()
            }
        }
    }
}

fn read_run(run: &Run, output: &mut Output<'_>) -> Result<(), ForeignError> {
    if let Some(manifest) = &run.manifest {
        output.model_info(&ModelInfo::from_manifest(&manifest.model))?;
    }
    for operation in run.routing() {
        let head = operation.head();
        let mut record = operation.first_record();
        for token in operation.tokens() {
            let at = || Location::Record {
                record,
                offset: record * RECORD_SIZE as u64,
            };
            let mut row = RoutingRow {
                token_id: token.token_id(),
                sequence_id: token.sequence_id(),
                phase: Some(token.head().phase().ok_or_else(|| {
                    output.invalid(
                        at(),
                        "phase is neither prompt nor generate; the trace is damaged",
                    )
                })?),
                timestamp_ns: Some(head.timestamp_ns.get()),
                // `output` rejects the number for "no layer", which is above MAX_ID.
                ..RoutingRow::at_layer(LayerId(head.layer_id.get()))
            };
            for expert in token.experts() {
                row.slot = expert.slot;
                row.expert_id = expert.expert_id;
                row.weight = expert.weight;
                row.lane = Some(expert.lane).filter(|&lane| lane != lane::UNKNOWN);
                output.routing(at, &row)?;
            }
            record += token.records().len() as u64;
        }
    }
    Ok(())
}

fn read_tables(path: &Path, output: &mut Output<'_>) -> Result<(), ForeignError> {
    let mut file = PathBuf::new();
    let mut first_row = 0;
    for batch in read_routing(path)? {
        let batch = batch?;
        if batch.file() != file {
            batch.file().clone_into(&mut file);
            first_row = 0;
            output.begin_file(&file);
            let metadata = TableMetadata::read(&file)?;
            let model = metadata.json(MODEL_KEY)?;
            let mut model_info = model
                .as_ref()
                .map(ModelInfo::from_manifest)
                .unwrap_or_default();
            model_info.expert_bytes = metadata.json(EXPERT_BYTES_KEY)?.unwrap_or_default();
            if model_info != ModelInfo::default() {
                output.model_info(&model_info)?;
            }
        }
        let mut sequence_ids = batch.sequence_id().iter();
        let mut weights = batch.weight().iter();
        for i in 0..batch.len() {
            let row = RoutingRow {
                token_id: TokenId(batch.token_id()[i]),
                sequence_id: sequence_ids.next().flatten(),
                phase: batch.phase()[i],
                layer_id: LayerId(batch.layer_id()[i]),
                slot: batch.slot()[i],
                expert_id: ExpertId(batch.expert_id()[i]),
                weight: weights.next().flatten(),
                lane: Some(batch.lane()[i]).filter(|&lane| lane != lane::UNKNOWN),
                timestamp_ns: Some(batch.timestamp_ns()[i]).filter(|&ns| ns != 0),
            };
            output.routing(|| Location::Element(format!("row {}", first_row + i)), &row)?;
        }
        first_row += batch.len();
    }
    Ok(())
}
