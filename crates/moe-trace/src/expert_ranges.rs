//! The byte ranges of experts, from the offset map.

use std::collections::HashMap;

use moe_gguf::ExpertId;
use moe_gguf::map::{Category, MapRow, OffsetMap};

/// A byte range in a file of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ByteRange {
    /// Index of the file (GGUF shard), from 0.
    pub file: u16,
    /// Offset of the first byte in the file.
    pub file_offset: u64,
    /// Length in bytes.
    pub size_bytes: u64,
}

/// A tensor whose bytes belong to experts.
pub enum ExpertTensor<'a> {
    /// Stacked weights: the map has one row for each expert.
    Weights(&'a [MapRow]),
    /// Biases of shape `[n, n_expert]`: one row of the map, in which each expert has an equal part.
    Bias(&'a MapRow),
}

impl ExpertTensor<'_> {
    /// Number of experts.
    pub fn n_expert(&self) -> u64 {
        match self {
            Self::Weights(rows) => rows.len() as u64,
            Self::Bias(row) => row.ne[1],
        }
    }

    /// The byte range of one expert; `None` if the tensor does not have it.
    pub fn range(&self, expert_id: ExpertId) -> Option<ByteRange> {
        match self {
            Self::Weights(rows) => {
                let row = rows
                    .get(expert_id.index())
                    .filter(|row| row.expert_id == Some(expert_id))?;
                Some(ByteRange {
                    file: row.file,
                    file_offset: row.file_offset,
                    size_bytes: row.size_bytes,
                })
            }
            Self::Bias(row) => {
                let size_bytes = row.size_bytes.checked_div(row.ne[1])?;
                let file_offset = row
                    .file_offset
                    .checked_add(size_bytes.checked_mul(expert_id.0.into())?)?;
                (u64::from(expert_id.0) < row.ne[1]).then_some(ByteRange {
                    file: row.file,
                    file_offset,
                    size_bytes,
                })
            }
        }
    }
}

/// The tensors of a map whose bytes belong to experts, by their index in the tensor table.
#[derive(Default)]
pub struct ExpertRanges<'a> {
    tensors: HashMap<u32, ExpertTensor<'a>>,
}

impl<'a> ExpertRanges<'a> {
    /// Finds these tensors in the map.
    pub fn new(map: &'a OffsetMap) -> Self {
        let tensors = map
            .rows
            .chunk_by(|a, b| a.tensor_idx == b.tensor_idx)
            .filter_map(|rows| Some((rows.first()?.tensor_idx, expert_tensor(rows)?)))
            .collect();
        Self { tensors }
    }

    /// The tensor with this index; `None` if its bytes do not belong to experts.
    pub fn get(&self, tensor_idx: u32) -> Option<&ExpertTensor<'a>> {
        self.tensors.get(&tensor_idx)
    }
}

fn expert_tensor(rows: &[MapRow]) -> Option<ExpertTensor<'_>> {
    let first = rows.first()?;
    match first.category {
        // Older files have one tensor for each expert; such a tensor is not stacked.
        Category::Expert if first.expert_id == Some(ExpertId(0)) => {
            Some(ExpertTensor::Weights(rows))
        }
        _ => first.n_stacked_biases().map(|_| ExpertTensor::Bias(first)),
    }
}
