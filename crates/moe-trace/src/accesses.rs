//! The ranges of the model's files that operations read.

use moe_gguf::map::OffsetMap;
use moe_ids::ExpertId;

use crate::correlation::Correlation;
use crate::expert_ranges::ExpertRanges;
use crate::fault::{RecordFault, SourceFault};
use crate::operations::{Operation, expert_id};

/// A range of a file that an operation read; of an expert tensor, each distinct expert of the operation once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// Place among the operation's sources.
    pub source: u8,
    /// The tensor; `None` if the map does not have it.
    pub tensor_idx: Option<u32>,
    /// The expert; `None` = the whole tensor.
    pub expert_id: Option<ExpertId>,
    /// File, the first one is 0.
    pub file: u16,
    /// First byte.
    pub file_offset: u64,
    /// Bytes.
    pub size_bytes: u64,
}

/// Tells the ranges that operations read, by the model's map.
#[derive(Default)]
pub struct FileAccesses<'a> {
    correlation: Correlation<'a>,
    experts: ExpertRanges<'a>,
}

impl<'a> FileAccesses<'a> {
    /// By the map of a run; without one an expert tensor is a range as a whole.
    pub fn new(map: Option<&'a OffsetMap>) -> Self {
        map.map_or_else(Self::default, |map| Self {
            correlation: Correlation::new(map),
            experts: ExpertRanges::new(map),
        })
    }

    /// Hands the ranges of an operation to `each`: sources in order, experts by ascending id. `experts` is room to work in.
    ///
    /// # Errors
    /// [`RecordFault::Source`]: a range beyond 64 bits; a record that says of itself that it is of this model and reads
    /// bytes that are not its tensor's, or an expert that the tensor does not have.
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

    /// As [`FileAccesses::of_operation`], of source `i`, which must be one of the model's file. `experts` must be empty
    /// before the first source of an operation.
    ///
    /// # Errors
    /// As [`FileAccesses::of_operation`].
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
        if !self.correlation.holds(head, i) {
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
