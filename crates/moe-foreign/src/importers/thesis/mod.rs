//! TensorAccessLog v4 traces (E. Keri's BSc thesis, <https://github.com/ErsjanKeri/BSC>): `trace.bin` and `token-NNNNN.json`.
//!
//! A fork of llama.cpp (<https://github.com/ErsjanKeri/llama.cpp>) writes a 1024-byte record per operation ([`TensorAccessLog`])
//! to `tensor_trace.bin`. `parse_trace.py` converts it to one JSON file per token ([`ThesisJson`]):
//!
//! ```text
//! {"token_id": 0, "metadata": {"total_entries": 1, ...},
//!  "entries": [{"timestamp_ns": 1, "token_id": 0, "layer_id": 3, "phase": "PROMPT", "operation_type": "MUL_MAT_ID",
//!               "dst_name": "ffn_moe_up-3", "sources": [{"name": "blk.3.ffn_up_exps.weight", "size_bytes": 4096, "layer_id": 3,
//!               "memory_source": "DISK", "disk_offset": 8192, "tensor_ptr": "0x7f00"}], "expert_ids": [5, 1], "num_experts": 2}]}
//! ```
//!
//! Timestamps are in nanoseconds of a monotonic clock, sizes and offsets in bytes. Compared with our records, the formats lack the
//! experts of all tokens of a batch except the first (of which at most 16 are recorded), router weights, sequences, lanes and
//! durations. JSON also lacks sizes above 4 GiB and tensor indices. The warm-up pass of llama.cpp, which routes to all experts, is
//! recorded like any other; [`passes`] recognizes it.
//!
//! Definition: `tensor-tracing/tools/parse_trace.py` in the first repository.

mod json;
mod passes;

use moe_files::text::counted;
use moe_trace::record::{EXT_NONE, MAX_EXPERTS, NAME_SIZE, RECORD_SIZE, TensorAccessLog};
use moe_trace::{PassTable, RoutingRow, Run, Trace, is_trace};
use zerocopy::FromBytes;

use crate::{Contents, ForeignError, ImportOptions, Importer, Location, Output, Records, Source};

pub use json::ThesisJson;

/// Importer of `trace.bin` (`tensor_trace.bin`).
pub struct Thesis;

impl Importer for Thesis {
    fn name(&self) -> &'static str {
        "thesis"
    }

    fn description(&self) -> &'static str {
        "trace.bin in TensorAccessLog v4 format (BSc thesis of E. Keri): every operation, experts of the first token of each batch"
    }

    fn contents(&self) -> Contents {
        Contents::Records
    }

    fn is_binary(&self) -> bool {
        true
    }

    fn is_applicable(&self, sample: &[u8]) -> bool {
        if !is_trace(sample) {
            return false;
        }
        let (records, _) = sample.as_chunks::<RECORD_SIZE>();
        let mut records = records
            .iter()
            .filter_map(|bytes| TensorAccessLog::ref_from_bytes(bytes).ok())
            .take_while(|record| record.timestamp_ns.get() != 0)
            .peekable();
        records.peek().is_some() && records.all(is_plain)
    }

    fn import(
        &self,
        source: &Source,
        options: &ImportOptions,
        output: &mut Output<'_>,
    ) -> Result<(), ForeignError> {
        import_records(self.records(source, options), output)
    }

    fn records(
        &self,
        source: &Source,
        options: &ImportOptions,
    ) -> Result<Option<Records>, ForeignError> {
        let path = source.path();
        let trace = Trace::open(path)?;
        let mut records = Records::new(trace, options)?;
        let tail = records.run.trace.size_bytes() / RECORD_SIZE as u64
            - records.run.trace.records().len() as u64;
        if tail > 0 {
            records.notes.push(format!(
                "skipped {} from the first record without a timestamp on: unused space of the recorder",
                counted(tail, "record")
            ));
        }
        Ok(Some(records))
    }
}

/// Whether a record may be plain v4, without our extension. The padding before the name may contain any bytes, the name any
/// except control characters.
fn is_plain(record: &TensorAccessLog) -> bool {
    record.ext_version == EXT_NONE
        && record.counts_fit()
        && record.phase().is_some()
        && record.reserved == [0; 44]
        && record.dst_name_bytes().len() < NAME_SIZE
        && !record.dst_name_bytes().iter().any(u8::is_ascii_control)
}

/// Passes on the routing of the records, with token positions instead of the thesis's token numbers, without the warm-up.
fn import_records(
    records: Result<Option<Records>, ForeignError>,
    output: &mut Output<'_>,
) -> Result<(), ForeignError> {
    let Some(Records { run, notes }) = records? else {
        return Ok(());
    };
    notes.into_iter().for_each(|note| output.note(note));
    let unknown = PassTable::default();
    let passes = run.passes().unwrap_or(&unknown);
    for operation in run.routing() {
        let record = operation.first_record();
        let at = || Location::Record {
            record,
            offset: record * RECORD_SIZE as u64,
        };
        let pass = passes.at(record);
        if pass.is_some_and(|pass| pass.is_warm_up) {
            continue;
        }
        let head = operation.head();
        head.check_readable()
            .map_err(|error| output.invalid(at(), error))?;
        let (Some(layer), Some(phase)) = (head.layer(), head.phase()) else {
            let reason =
                "a record with experts has no layer or no valid phase; the trace is damaged";
            return Err(output.invalid(at(), reason));
        };
        let row = RoutingRow {
            token_id: pass.map_or_else(|| head.token(), |pass| pass.token_id),
            phase: Some(phase),
            timestamp_ns: Some(head.timestamp_ns.get()),
            ..RoutingRow::at_layer(layer)
        };
        let experts = head.expert_ids().iter().map(|id| (id.get().into(), None));
        output.token(at, &row, experts.take(MAX_EXPERTS))?;
    }
    Ok(())
}

impl Records {
    /// Records of the thesis's recorder, with a table of their passes.
    fn new(trace: Trace, options: &ImportOptions) -> Result<Self, ForeignError> {
        let mut run = Run::from_trace(trace);
        if let Some(ops) = &options.ops {
            run = run.with_ops(ops.clone());
        }
        let mul_mat_id = run.ops().number("MUL_MAT_ID");
        let (passes, notes) =
            passes::table(&run.trace, mul_mat_id, options).map_err(|operation| {
                ForeignError::Operations {
                    path: run.path.clone(),
                    operation,
                }
            })?;
        let run = run.with_passes(passes);
        Ok(Self { run, notes })
    }
}
