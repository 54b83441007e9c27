//! Helpers that write the tables of a run and read their columns.

use std::fs::File;
use std::path::Path;

use arrow::array::{AsArray, RecordBatch};
use arrow::compute::{cast, concat_batches};
use arrow::datatypes::{DataType, Int64Type};
use moe_trace::TensorAccessLog;
use moe_trace::tables::{TableOptions, TableSummary, write_tables};
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;

use super::common::run_of;

/// Writes the tables of a run with these records.
pub fn tables_of(records: &[TensorAccessLog]) -> (tempfile::TempDir, TableSummary) {
    let tmp = tempfile::tempdir().unwrap();
    let run = run_of(&tmp.path().join("run"), records);
    let summary = write_tables(&run, tmp.path(), TableOptions::default()).unwrap();
    (tmp, summary)
}

pub fn read(path: &Path) -> RecordBatch {
    let builder = ParquetRecordBatchReaderBuilder::try_new(File::open(path).unwrap()).unwrap();
    let schema = builder.schema().clone();
    let batches: Vec<_> = builder.build().unwrap().map(Result::unwrap).collect();
    concat_batches(&schema, &batches).unwrap()
}

/// A column of integers; null is -1.
pub fn ints(batch: &RecordBatch, name: &str) -> Vec<i64> {
    let column = cast(batch.column_by_name(name).unwrap(), &DataType::Int64).unwrap();
    let column = column.as_primitive::<Int64Type>();
    column.iter().map(|value| value.unwrap_or(-1)).collect()
}

/// A column of names; null is `-`.
pub fn names(batch: &RecordBatch, name: &str) -> Vec<String> {
    let column = batch.column_by_name(name).unwrap();
    assert!(
        matches!(column.data_type(), DataType::Dictionary(..)),
        "{name} is dictionary-encoded"
    );
    let column = cast(column, &DataType::Utf8).unwrap();
    column
        .as_string::<i32>()
        .iter()
        .map(|value| value.unwrap_or("-").to_owned())
        .collect()
}
