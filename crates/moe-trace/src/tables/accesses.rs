//! The table `accesses`: each row is a byte range that an operation read, once for each (operation, source, expert).

use std::sync::{Arc, LazyLock};

use arrow::array::{
    ArrayBuilder, ArrayRef, Int32Builder, RecordBatch, StringArray, UInt8Builder, UInt16Builder,
    UInt32Builder, UInt64Builder,
};
use arrow::datatypes::{DataType, Schema, SchemaRef};
use arrow::error::ArrowError;
use moe_ids::ExpertId;

use super::MEMORY_SOURCES;
use super::names::NameTable;
use super::rows::{Context, Rows, strings};
use crate::accesses::Access;
use crate::error::Error;
use crate::fault::{RecordFault, SourceFault};
use crate::operations::Operation;
use crate::parquet_columns::{dictionary, name_type, optional, required};

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

/// Builds rows of `accesses`.
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
    /// Distinct experts of the current operation.
    experts: Vec<ExpertId>,
}

/// The values that all rows of a source have in common.
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
            let error = |fault| {
                let source_index = i;
                let fault = RecordFault::Source {
                    source_index,
                    fault,
                };
                context.record_error(operation.first_record(), fault)
            };
            if usize::from(log.memory_source) >= MEMORY_SOURCES.len() {
                let memory_source = log.memory_source;
                return Err(error(SourceFault::MemorySource { memory_source }));
            }
            let tensor = self.names.key(log.name_bytes());
            let source = Source {
                op_index,
                index,
                tensor,
                memory_source: log.memory_source,
            };
            if !log.is_disk() {
                self.push_buffer(&source, head.source_size(i), log.offset_or_buffer_id.get());
                continue;
            }
            let mut experts = std::mem::take(&mut self.experts);
            context
                .accesses
                .of_source(operation, i, &mut experts, |access| {
                    self.push_file(&source, &access);
                })
                .map_err(error)?;
            self.experts = experts;
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
    fn push_buffer(&mut self, source: &Source, size_bytes: u64, buffer_id: u64) {
        self.push_row(source, None, None, None, size_bytes, Some(buffer_id));
    }

    fn push_file(&mut self, source: &Source, access: &Access) {
        let (file, file_offset) = (Some(access.file), Some(access.file_offset));
        self.push_row(
            source,
            file,
            access.expert_id,
            file_offset,
            access.size_bytes,
            None,
        );
    }

    fn push_row(
        &mut self,
        source: &Source,
        file: Option<u16>,
        expert_id: Option<ExpertId>,
        file_offset: Option<u64>,
        size_bytes: u64,
        buffer_id: Option<u64>,
    ) {
        self.op_index.append_value(source.op_index);
        self.source.append_value(source.index);
        self.file.append_option(file);
        self.tensor.append_value(source.tensor);
        self.expert_id.append_option(expert_id.map(|id| id.0));
        self.memory_source.append_value(source.memory_source.into());
        self.file_offset.append_option(file_offset);
        self.size_bytes.append_value(size_bytes);
        self.buffer_id.append_option(buffer_id);
    }
}
