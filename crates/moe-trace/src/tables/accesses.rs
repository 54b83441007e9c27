//! `accesses`: a row is a range of bytes that an operation read, each (operation, expert) once.

use std::sync::{Arc, LazyLock};

use arrow::array::{
    ArrayBuilder, ArrayRef, Int32Builder, RecordBatch, StringArray, UInt8Builder, UInt16Builder,
    UInt32Builder, UInt64Builder,
};
use arrow::datatypes::{DataType, Schema, SchemaRef};
use arrow::error::ArrowError;

use super::MEMORY_SOURCES;
use super::names::NameTable;
use super::ranges::ExpertTensor;
use super::rows::{Context, Rows, strings};
use crate::error::Error;
use crate::operations::{Operation, expert_id};
use crate::parquet_file::{dictionary, name_type, optional, required};

static ACCESSES: LazyLock<SchemaRef> = LazyLock::new(|| {
    Arc::new(Schema::new(vec![
        required("op_index", DataType::UInt64),
        required("source", DataType::UInt8),
        optional("file", DataType::UInt16),
        required("tensor", name_type()),
        optional("expert_id", DataType::UInt32),
        required("memory_source", name_type()),
        optional("file_offset", DataType::UInt64),
        required("size_bytes", DataType::UInt64),
        optional("buffer_id", DataType::UInt64),
    ]))
});

static MEMORY_SOURCE_NAMES: LazyLock<Arc<StringArray>> = LazyLock::new(|| strings(&MEMORY_SOURCES));

/// Rows of `accesses`.
#[derive(Default)]
pub(crate) struct AccessRows {
    op_index: UInt64Builder,
    source: UInt8Builder,
    file: UInt16Builder,
    tensor: Int32Builder,
    expert_id: UInt32Builder,
    memory_source: Int32Builder,
    file_offset: UInt64Builder,
    size_bytes: UInt64Builder,
    buffer_id: UInt64Builder,
    names: NameTable,
    /// Distinct experts of the operation at hand.
    experts: Vec<u32>,
}

/// What a source has in common over its rows.
struct Source {
    op_index: u64,
    index: u8,
    tensor: i32,
    memory_source: u8,
}

impl<'a> Rows<'a> for AccessRows {
    const ASCENDING: &'static [&'static str] = &["op_index"];

    fn schema() -> &'static SchemaRef {
        &ACCESSES
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
        self.experts.clear();
        for (log, index) in head.sources().iter().zip(0u8..) {
            let i = usize::from(index);
            let error = |reason: String| {
                context.record_error(operation.first_record(), format!("source {i}: {reason}"))
            };
            if usize::from(log.memory_source) >= MEMORY_SOURCES.len() {
                return Err(error(format!(
                    "memory source {} is neither 0 (disk) nor 1 (buffer)",
                    log.memory_source
                )));
            }
            let tensor = self.names.key(log.name_bytes());
            let source = Source {
                op_index,
                index,
                tensor,
                memory_source: log.memory_source,
            };
            let location = log.offset_or_buffer_id.get();
            let size_bytes = head.source_size(i);
            if !log.is_disk() {
                self.push_row(&source, None, None, None, size_bytes, Some(location));
                continue;
            }
            if location.checked_add(size_bytes).is_none() {
                return Err(error(format!(
                    "{size_bytes} bytes at {location} end beyond 64 bits"
                )));
            }
            if !context.tensors.hold(head, i) {
                return Err(error(format!(
                    "{size_bytes} bytes at {location} are not those of {} (tensor {}) in gguf-map.parquet; is this the model's map?",
                    log.name(),
                    log.tensor_idx.get()
                )));
            }
            if head.num_experts > 0
                && let Some(tensor) = context.experts.get(log.tensor_idx.get())
            {
                self.push_experts(&source, operation, tensor)
                    .map_err(error)?;
                continue;
            }
            let file = if head.has_extension() {
                head.source_file[i].get()
            } else {
                0
            };
            self.push_row(&source, Some(file), None, Some(location), size_bytes, None);
        }
        Ok(())
    }

    fn take(&mut self) -> Result<RecordBatch, ArrowError> {
        let columns: Vec<ArrayRef> = vec![
            Arc::new(self.op_index.finish()),
            Arc::new(self.source.finish()),
            Arc::new(self.file.finish()),
            dictionary(self.tensor.finish(), self.names.strings()),
            Arc::new(self.expert_id.finish()),
            dictionary(self.memory_source.finish(), &MEMORY_SOURCE_NAMES),
            Arc::new(self.file_offset.finish()),
            Arc::new(self.size_bytes.finish()),
            Arc::new(self.buffer_id.finish()),
        ];
        RecordBatch::try_new(ACCESSES.clone(), columns)
    }
}

impl AccessRows {
    /// A row for each distinct expert of the operation, ids ascending.
    fn push_experts(
        &mut self,
        source: &Source,
        operation: &Operation<'_>,
        tensor: &ExpertTensor<'_>,
    ) -> Result<(), String> {
        if self.experts.is_empty() {
            let ids = operation
                .records()
                .iter()
                .flat_map(|record| record.expert_ids());
            self.experts.extend(ids.filter_map(expert_id));
            self.experts.sort_unstable();
            self.experts.dedup();
        }
        for i in 0..self.experts.len() {
            let expert = self.experts[i];
            let range = tensor.range(expert).ok_or_else(|| {
                format!(
                    "expert {expert} is not in its tensor, which has {}; is this the model's map?",
                    tensor.n_expert()
                )
            })?;
            self.push_row(
                source,
                Some(range.file),
                Some(expert),
                Some(range.file_offset),
                range.size_bytes,
                None,
            );
        }
        Ok(())
    }

    fn push_row(
        &mut self,
        source: &Source,
        file: Option<u16>,
        expert_id: Option<u32>,
        file_offset: Option<u64>,
        size_bytes: u64,
        buffer_id: Option<u64>,
    ) {
        self.op_index.append_value(source.op_index);
        self.source.append_value(source.index);
        self.file.append_option(file);
        self.tensor.append_value(source.tensor);
        self.expert_id.append_option(expert_id);
        self.memory_source.append_value(source.memory_source.into());
        self.file_offset.append_option(file_offset);
        self.size_bytes.append_value(size_bytes);
        self.buffer_id.append_option(buffer_id);
    }
}
