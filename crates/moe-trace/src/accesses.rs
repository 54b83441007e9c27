//! The byte ranges of the model's files that operations read.

use moe_gguf::map::OffsetMap;
use moe_ids::ExpertId;

use crate::correlation::Correlation;
use crate::expert_ranges::ExpertRanges;
use crate::fault::{RecordFault, SourceFault};
use crate::operations::{Operation, expert_id};

/// A byte range of a file that an operation read. For an expert tensor, each distinct expert of the operation is one range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// Index among the sources of the operation, from 0.
    pub source: u8,
    /// Index of the tensor in the map; `None` if the map does not contain it.
    pub tensor_idx: Option<u32>,
    /// The expert; `None` if the range is the entire tensor.
    pub expert_id: Option<ExpertId>,
    /// Index of the file (GGUF shard), from 0.
    pub file: u16,
    /// Offset of the first byte from the start of the file.
    pub file_offset: u64,
    /// Length in bytes.
    pub size_bytes: u64,
}

/// Finds the byte ranges that operations read, with the model's offset map.
#[derive(Default)]
pub struct FileAccesses<'a> {
    correlation: Correlation<'a>,
    experts: ExpertRanges<'a>,
}

impl<'a> FileAccesses<'a> {
    /// Uses the offset map of a run. Without a map, the ranges of single experts are unknown: an expert tensor is one range.
    pub fn new(map: Option<&'a OffsetMap>) -> Self {
        map.map_or_else(Self::default, |map| Self {
            correlation: Correlation::new(map),
            experts: ExpertRanges::new(map),
        })
    }

    /// Calls `each` for every range of an operation: sources in order, experts by ascending id. `experts` is a scratch buffer.
    ///
    /// # Errors
    /// [`RecordFault::Source`]: a range ends beyond 64 bits; the bytes are not those of the tensor that the record names; or the
    /// tensor does not have the expert.
    pub fn of_operation(
        &self,
        operation: &Operation<'_>,
        experts: &mut Vec<ExpertId>,
        mut each: impl FnMut(Access),
    ) -> Result<(), RecordFault> {
        experts.clear();
        for (i, source) in operation.head().sources().iter().enumerate() {
            if source.is_disk() {
                self.of_source(operation, i, experts, &mut each)
                    .map_err(|fault| RecordFault::Source {
                        source_index: i,
                        fault,
                    })?;
            }
        }
        Ok(())
    }

    /// Like [`FileAccesses::of_operation`], for source `i` alone, which must be in a file of the model. `experts` must be empty
    /// before the first source of an operation.
    ///
    /// # Errors
    /// Those of [`FileAccesses::of_operation`].
    pub(crate) fn of_source(
        &self,
        operation: &Operation<'_>,
        i: usize,
        experts: &mut Vec<ExpertId>,
        mut each: impl FnMut(Access),
    ) -> Result<(), SourceFault> {
        let head = operation.head();
        let Some(log) = head.sources().get(i) else {
            return Ok(());
        };
        let (location, size_bytes) = (log.offset_or_buffer_id.get(), head.source_size(i));
        if location.checked_add(size_bytes).is_none() {
            return Err(SourceFault::Overflow {
                size_bytes,
                offset: location,
            });
        }
        if !self.correlation.is_consistent(head, i) {
            return Err(SourceFault::OtherTensor {
                size_bytes,
                offset: location,
                name: log.name().into_owned(),
                tensor_idx: log.tensor_idx.get(),
            });
        }
        let source = u8::try_from(i).expect("a record has few sources");
        let tensor_idx = self.correlation.resolve(head, i);
        let expert_tensor = tensor_idx
            .filter(|_| head.num_experts > 0)
            .and_then(|index| self.experts.get(index));
        let Some(tensor) = expert_tensor else {
            let file = if head.has_extension() {
                head.source_file[i].get()
            } else {
                0
            };
            each(Access {
                source,
                tensor_idx,
                expert_id: None,
                file,
                file_offset: location,
                size_bytes,
            });
            return Ok(());
        };
        if experts.is_empty() {
            let records = operation.records().iter();
            let ids = records.flat_map(|record| record.expert_ids());
            experts.extend(ids.filter_map(expert_id));
            experts.sort_unstable();
            experts.dedup();
        }
        for &expert in experts.iter() {
            let n_expert = tensor.n_expert();
            let range = tensor
                .range(expert)
                .ok_or(SourceFault::NoExpert { expert, n_expert })?;
            each(Access {
                source,
                tensor_idx,
                expert_id: Some(expert),
                file: range.file,
                file_offset: range.file_offset,
                size_bytes: range.size_bytes,
            });
        }
        Ok(())
    }
}
