//! Traces of the thesis's llama.cpp (TensorAccessLog v4): `trace.bin` and the `token-NNNNN.json` made from it.
//!
//! A record is an operation. An expert operation contains the experts of the first token of its batch alone, sixteen at most, and
//! the graph that llama.cpp warms up with is recorded as any other; [`passes`] recognizes it.

mod json;
mod passes;

use moe_gguf::text::counted;
use moe_trace::record::{EXT_NONE, MAX_EXPERTS, NAME_SIZE, RECORD_SIZE, TensorAccessLog};
use moe_trace::{PassTable, RoutingRow, Run, Trace, is_trace};
use zerocopy::FromBytes;

use crate::{At, Contents, ForeignError, ImportOptions, Importer, Output, Records, Source};

pub use json::ThesisJson;

/// `trace.bin`, or `tensor_trace.bin` as its recorder calls it.
pub struct Thesis;

impl Importer for Thesis {
    fn name(&self) -> &'static str {
        "thesis"
    }

    fn description(&self) -> &'static str {
        "trace.bin of the BSC thesis's llama.cpp: every operation, of a batch the experts of its first token"
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
                "left out: {} behind the first one without a time, the recorder's unused room",
                counted(tail, "record")
            ));
        }
        Ok(Some(records))
    }
}

/// Whether a record can be one of the thesis's: plain v4. The padding before the name may hold anything, and so may a name, but
/// for control characters.
fn is_plain(record: &TensorAccessLog) -> bool {
    record.ext_version == EXT_NONE
        && record.counts_fit()
        && record.phase().is_some()
        && record.reserved == [0; 44]
        && record.dst_name_bytes().len() < NAME_SIZE
        && !record.dst_name_bytes().iter().any(u8::is_ascii_control)
}

/// The routing of records, with positions for the thesis's numbers of tokens and without the warm-up.
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
        let at = || At::Record {
            record,
            offset: record * RECORD_SIZE as u64,
        };
        let pass = passes.at(record);
        if pass.is_some_and(|pass| pass.is_warm_up) {
            continue;
        }
        let head = operation.head();
        head.check_readable()
            .map_err(|fault| output.invalid(at(), fault))?;
        let (Some(layer), Some(phase)) = (head.layer(), head.phase()) else {
            let reason =
                "its experts are of no layer, or its phase is not known; the trace is damaged";
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
    /// Records of the thesis's recorder, with what is known of their passes.
    fn new(trace: Trace, options: &ImportOptions) -> Result<Self, ForeignError> {
        let mut run = Run::of_trace(trace);
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
