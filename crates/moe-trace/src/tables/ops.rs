//! The table `ops`: each row is an operation.

use std::sync::{Arc, LazyLock};

use arrow::array::{
    ArrayBuilder, ArrayRef, BooleanBuilder, Int32Builder, RecordBatch, UInt8Builder, UInt16Builder,
    UInt32Builder, UInt64Builder,
};
use arrow::datatypes::{DataType, Schema, SchemaRef};
use arrow::error::ArrowError;

use super::names::NameTable;
use super::rows::{Context, PHASE_NAMES, Rows};
use crate::error::Error;
use crate::operations::Operation;
use crate::ops::OpTable;
use crate::parquet_columns::{dictionary, name_type, optional, required};
use crate::record::{FLAG_CPU_FALLBACK, FLAG_SOURCES_OMITTED};

static OPS: LazyLock<SchemaRef> = LazyLock::new(|| {
    Arc::new(Schema::new(vec![
        required("op_index", DataType::UInt64),
        required("timestamp_ns", DataType::UInt64),
        optional("duration_ns", DataType::UInt64),
        required("token_id", DataType::UInt32),
        optional("sequence_id", DataType::UInt32),
        required("phase", name_type()),
        optional("layer_id", DataType::UInt16),
        required("thread_id", DataType::UInt16),
        required("op", name_type()),
        required("dst_name", name_type()),
        optional("n_tokens", DataType::UInt32),
        required("num_sources", DataType::UInt8),
        required("cpu_fallback", DataType::Boolean),
        required("sources_omitted", DataType::Boolean),
    ]))
});

/// Builds rows of `ops`.
pub(crate) struct OpRows {
    op_index: UInt64Builder,
    timestamp_ns: UInt64Builder,
    duration_ns: UInt64Builder,
    token_id: UInt32Builder,
    sequence_id: UInt32Builder,
    phase: Int32Builder,
    layer_id: UInt16Builder,
    thread_id: UInt16Builder,
    op: Int32Builder,
    dst_name: Int32Builder,
    n_tokens: UInt32Builder,
    num_sources: UInt8Builder,
    cpu_fallback: BooleanBuilder,
    sources_omitted: BooleanBuilder,
    op_names: NameTable,
    dst_names: NameTable,
    /// Keys in `op_names`, indexed by operation number.
    op_keys: [Option<i32>; 256],
}

impl Default for OpRows {
    fn default() -> Self {
        Self {
            op_index: Default::default(),
            timestamp_ns: Default::default(),
            duration_ns: Default::default(),
            token_id: Default::default(),
            sequence_id: Default::default(),
            phase: Default::default(),
            layer_id: Default::default(),
            thread_id: Default::default(),
            op: Default::default(),
            dst_name: Default::default(),
            n_tokens: Default::default(),
            num_sources: Default::default(),
            cpu_fallback: Default::default(),
            sources_omitted: Default::default(),
            op_names: Default::default(),
            dst_names: Default::default(),
            op_keys: [None; 256],
        }
    }
}

impl<'a> Rows<'a> for OpRows {
    const ASCENDING: &'static [&'static str] = &["op_index", "timestamp_ns", "duration_ns"];

    fn schema() -> &'static SchemaRef {
        &OPS
    }

    fn len(&self) -> usize {
        self.op_index.len()
    }

    fn push(
        &mut self,
        op_index: u64,
        operation: &Operation<'a>,
        context: &Context<'_>,
    ) -> Result<(), Error> {
        let head = operation.head();
        let extended = head.has_extension();
        self.op_index.append_value(op_index);
        self.timestamp_ns.append_value(head.timestamp_ns.get());
        self.duration_ns
            .append_option(Some(head.duration_ns.get()).filter(|&ns| extended && ns > 0));
        let token_id = context.token_id(operation.first_record(), head.token());
        self.token_id.append_value(token_id.0);
        self.sequence_id
            .append_option(extended.then(|| head.sequence_id.get()));
        self.phase
            .append_value(context.phase(head, operation.first_record())?);
        self.layer_id
            .append_option(head.layer().map(|layer| layer.0));
        self.thread_id.append_value(head.thread_id.get());
        let op = self.op_key(head.operation_type, context.ops);
        self.op.append_value(op);
        self.dst_name
            .append_value(self.dst_names.key(head.dst_name_bytes()));
        self.n_tokens
            .append_option(extended.then(|| head.n_tokens.get()));
        let n_sources = u8::try_from(head.sources().len()).expect("a record has few sources");
        self.num_sources.append_value(n_sources);
        self.cpu_fallback
            .append_value(head.has_flag(FLAG_CPU_FALLBACK));
        self.sources_omitted
            .append_value(head.has_flag(FLAG_SOURCES_OMITTED));
        Ok(())
    }

    fn take(&mut self) -> Result<RecordBatch, ArrowError> {
        let columns: Vec<ArrayRef> = vec![
            Arc::new(self.op_index.finish()),
            Arc::new(self.timestamp_ns.finish()),
            Arc::new(self.duration_ns.finish()),
            Arc::new(self.token_id.finish()),
            Arc::new(self.sequence_id.finish()),
            dictionary(self.phase.finish(), &PHASE_NAMES),
            Arc::new(self.layer_id.finish()),
            Arc::new(self.thread_id.finish()),
            dictionary(self.op.finish(), self.op_names.strings()),
            dictionary(self.dst_name.finish(), self.dst_names.strings()),
            Arc::new(self.n_tokens.finish()),
            Arc::new(self.num_sources.finish()),
            Arc::new(self.cpu_fallback.finish()),
            Arc::new(self.sources_omitted.finish()),
        ];
        RecordBatch::try_new(OPS.clone(), columns)
    }
}

impl OpRows {
    /// The key of an operation number; a number without a name becomes `op_N`.
    fn op_key(&mut self, number: u8, ops: &OpTable) -> i32 {
        let key = &mut self.op_keys[usize::from(number)];
        *key.get_or_insert_with(|| match ops.name(number) {
            Some(name) => self.op_names.key(name.as_bytes()),
            None => self.op_names.key(format!("op_{number}").as_bytes()),
        })
    }
}
