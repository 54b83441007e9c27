//! The table `routing`: each row is an expert of a token in a layer.

use std::sync::{Arc, LazyLock};

use arrow::array::{
    ArrayBuilder, ArrayRef, Float32Builder, Int32Builder, RecordBatch, StringArray, UInt16Builder,
    UInt32Builder, UInt64Builder,
};
use arrow::datatypes::{DataType, Schema, SchemaRef};
use arrow::error::ArrowError;

use super::rows::{Context, PHASE_NAMES, Rows, strings};
use crate::error::Error;
use crate::fault::RecordFault;
use crate::first_of_layer::FirstOfLayer;
use crate::operations::Operation;
use crate::parquet_columns::{dictionary, may_be_absent, name_type, optional, required};
use crate::record::lane;

/// Columns of the table.
pub(crate) static ROUTING: LazyLock<SchemaRef> = LazyLock::new(|| {
    Arc::new(Schema::new(vec![
        required("token_id", DataType::UInt32),
        optional("sequence_id", DataType::UInt32),
        required("phase", name_type()),
        required("layer_id", DataType::UInt16),
        required("slot", DataType::UInt16),
        required("expert_id", DataType::UInt32),
        optional("weight", DataType::Float32),
        optional("lane", name_type()),
        required("timestamp_ns", DataType::UInt64),
    ]))
});

/// The same columns for reading. Columns that a trace of another tool does not contain are null or missing.
pub(crate) static READ_ROUTING: LazyLock<SchemaRef> = LazyLock::new(|| {
    let is_known = |name: &str| !["phase", "timestamp_ns"].contains(&name);
    let fields = ROUTING.fields().iter().map(|field| {
        if is_known(field.name()) && !field.is_nullable() {
            field.as_ref().clone()
        } else {
            may_be_absent(field)
        }
    });
    Arc::new(Schema::new(fields.collect::<Vec<_>>()))
});

/// The columns that counting needs, for reading.
pub(crate) static COUNTING: LazyLock<SchemaRef> = LazyLock::new(|| {
    let fields = READ_ROUTING.fields().iter();
    let needed = fields.filter(|field| field.name() != "lane");
    Arc::new(Schema::new(needed.cloned().collect::<Vec<_>>()))
});

static LANE_NAMES: LazyLock<Arc<StringArray>> = LazyLock::new(|| strings(&lane::NAMES));

/// Builders of the columns, all of equal length.
#[derive(Default)]
pub(crate) struct Columns {
    pub(crate) token_id: UInt32Builder,
    pub(crate) sequence_id: UInt32Builder,
    pub(crate) phase: Int32Builder,
    pub(crate) layer_id: UInt16Builder,
    pub(crate) slot: UInt16Builder,
    pub(crate) expert_id: UInt32Builder,
    pub(crate) weight: Float32Builder,
    pub(crate) lane: Int32Builder,
    pub(crate) timestamp_ns: UInt64Builder,
}

impl Columns {
    /// Number of rows.
    pub(crate) fn len(&self) -> usize {
        self.expert_id.len()
    }

    /// Removes the rows and returns them as a batch. `schema` must have these columns.
    pub(crate) fn take(&mut self, schema: &SchemaRef) -> Result<RecordBatch, ArrowError> {
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
        RecordBatch::try_new(schema.clone(), columns)
    }
}

/// Builds rows of `routing`.
pub(crate) struct RoutingRows<'a> {
    first_of_layer: FirstOfLayer<'a>,
    columns: Columns,
}

impl<'a> RoutingRows<'a> {
    /// Starts without rows. `first_of_layer` is the state after all operations before the first one.
    pub(crate) fn new(first_of_layer: FirstOfLayer<'a>) -> Self {
        Self {
            first_of_layer,
            columns: Columns::default(),
        }
    }
}

impl<'a> Rows<'a> for RoutingRows<'a> {
    const ASCENDING: &'static [&'static str] = &["timestamp_ns"];

    fn schema() -> &'static SchemaRef {
        &ROUTING
    }

    fn len(&self) -> usize {
        self.columns.len()
    }

    fn push(
        &mut self,
        _op_index: u64,
        operation: &Operation<'a>,
        context: &Context<'_>,
    ) -> Result<(), Error> {
        if !self.first_of_layer.takes(operation) {
            return Ok(());
        }
        let head = operation.head();
        let mut record = operation.first_record();
        if context.is_warm_up(record) {
            return Ok(());
        }
        let layer = head
            .layer()
            .ok_or_else(|| context.record_error(record, RecordFault::NoLayer))?;
        let columns = &mut self.columns;
        for token in operation.tokens() {
            let phase = context.phase(token.head(), record)?;
            for expert in token.experts() {
                if usize::from(expert.lane) >= lane::NAMES.len() {
                    let lane = expert.lane;
                    return Err(context.record_error(record, RecordFault::Lane { lane }));
                }
                columns
                    .token_id
                    .append_value(context.token_id(record, token.token_id()).0);
                columns.sequence_id.append_option(token.sequence_id());
                columns.phase.append_value(phase);
                columns.layer_id.append_value(layer.0);
                columns.slot.append_value(expert.slot);
                columns.expert_id.append_value(expert.expert_id.0);
                columns.weight.append_option(expert.weight);
                columns
                    .lane
                    .append_option((expert.lane != lane::UNKNOWN).then(|| expert.lane.into()));
                columns.timestamp_ns.append_value(head.timestamp_ns.get());
            }
            record += token.records().len() as u64;
        }
        Ok(())
    }

    fn take(&mut self) -> Result<RecordBatch, ArrowError> {
        self.columns.take(&ROUTING)
    }
}
