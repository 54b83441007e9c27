//! Where the tensors of a model are, by the offset map.

use std::collections::HashMap;

use moe_gguf::map::OffsetMap;

use crate::record::{NO_TENSOR, TensorAccessLog};

/// Tensor index → (file, first byte, one past the last byte). Empty: not known.
#[derive(Debug, Default)]
pub(crate) struct TensorRanges {
    ranges: HashMap<u32, (u16, u64, u64)>,
}

impl TensorRanges {
    pub(crate) fn new(map: &OffsetMap) -> Self {
        let mut ranges = HashMap::new();
        for row in &map.rows {
            let end = row.file_offset.saturating_add(row.size_bytes);
            let range = ranges
                .entry(row.tensor_idx)
                .or_insert((row.file, row.file_offset, end));
            range.1 = range.1.min(row.file_offset);
            range.2 = range.2.max(end);
        }
        Self { ranges }
    }

    /// Whether source `i` of the record lies inside its tensor, if it is one of the model's file.
    pub(crate) fn hold(&self, record: &TensorAccessLog, i: usize) -> bool {
        let Some(source) = record.sources().get(i) else {
            return true;
        };
        let tensor_idx = source.tensor_idx.get();
        if self.ranges.is_empty() || !source.is_disk() || tensor_idx == NO_TENSOR {
            return true;
        }
        let Some(&(file, begin, end)) = self.ranges.get(&tensor_idx) else {
            return false;
        };
        let offset = source.offset_or_buffer_id.get();
        let source_end = offset.saturating_add(record.source_size(i));
        let source_file = if record.has_extension() {
            record.source_file[i].get()
        } else {
            0
        };
        source_file == file && begin <= offset && source_end <= end
    }
}
