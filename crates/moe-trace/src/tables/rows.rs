//! Common parts of the three tables: converting operations to rows, and rows to batches.

use std::path::Path;
use std::sync::{Arc, LazyLock};

use arrow::array::{RecordBatch, StringArray};
use arrow::datatypes::SchemaRef;
use arrow::error::ArrowError;
use moe_ids::TokenId;

use crate::accesses::FileAccesses;
use crate::error::Error;
use crate::fault::RecordFault;
use crate::operations::Operation;
use crate::ops::OpTable;
use crate::pass_table::PassTable;
use crate::phase::Phase;
use crate::record::TensorAccessLog;

/// The run from which rows are made.
pub(crate) struct Context<'a> {
    pub trace: &'a Path,
    pub ops: &'a OpTable,
    pub accesses: FileAccesses<'a>,
    /// Positions of the tokens, if the records do not contain them.
    pub passes: Option<&'a PassTable>,
}

impl Context<'_> {
    /// Position of the first token of the record's pass, from the pass table; `recorded` without such a table.
    pub(crate) fn token_id(&self, record: u64, recorded: TokenId) -> TokenId {
        let pass = self.passes.and_then(|passes| passes.at(record));
        pass.map_or(recorded, |pass| pass.token_id)
    }

    /// Whether the record belongs to a warm-up pass, whose experts the router did not select.
    pub(crate) fn is_warm_up(&self, record: u64) -> bool {
        let pass = self.passes.and_then(|passes| passes.at(record));
        pass.is_some_and(|pass| pass.is_warm_up)
    }

    pub(crate) fn record_error(&self, record: u64, fault: RecordFault) -> Error {
        Error::record(self.trace, record, fault)
    }

    /// The key of a record's phase in [`PHASE_NAMES`].
    pub(crate) fn phase(&self, record: &TensorAccessLog, index: u64) -> Result<i32, Error> {
        let unknown = || {
            let phase = record.phase;
            self.record_error(index, RecordFault::Phase { phase })
        };
        record
            .phase()
            .map(|phase| phase.number().into())
            .ok_or_else(unknown)
    }
}

/// Builds rows of a table, in batches.
pub(crate) trait Rows<'a> {
    /// Columns whose values increase from row to row or rarely repeat: delta-encoded, without a dictionary.
    const ASCENDING: &'static [&'static str];

    /// Columns of the table.
    fn schema() -> &'static SchemaRef;
    /// Number of rows so far.
    fn len(&self) -> usize;
    /// Adds the rows of an operation.
    fn push(
        &mut self,
        op_index: u64,
        operation: &Operation<'a>,
        context: &Context<'_>,
    ) -> Result<(), Error>;
    /// Removes all rows and returns them as a batch.
    fn take(&mut self) -> Result<RecordBatch, ArrowError>;
}

/// The dictionary of a `phase` column.
pub(super) static PHASE_NAMES: LazyLock<Arc<StringArray>> =
    LazyLock::new(|| strings(&Phase::ALL.map(Phase::name)));

/// The dictionary of a column whose keys are numbers in records.
pub(crate) fn strings(names: &[&str]) -> Arc<StringArray> {
    Arc::new(StringArray::from_iter_values(names))
}
