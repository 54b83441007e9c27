//! The offset map: which bytes of which file are which tensor and expert.

use std::sync::Arc;

use moe_ids::{ExpertId, LayerId};
use serde::ser::SerializeStruct;
use serde::{Serialize, Serializer};

use crate::gguf::{Gguf, Tensor};
use crate::names::Role;
use crate::types::GgmlType;

pub use crate::names::{Category, Projection};

/// The most rows that splitting 3-D tensors may give: a header of a few bytes can claim any number
/// of experts, and a file with a hole can seem to hold them. The largest models of today have about
/// 70,000 (expert, projection) pairs; 96 layers of 3 × 1024 experts have 294,912.
pub const MAX_EXPERT_ROWS: u64 = 5 << 16;

/// All rows of a model, in the order of its tensor table. The rows of a tensor tile it exactly.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OffsetMap {
    /// One row an expert for stacked expert weights, one a tensor for everything else.
    pub rows: Vec<MapRow>,
}

/// A range of a file that belongs to one tensor, or to one expert of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MapRow {
    /// Index of the file in [`Gguf::files`].
    pub file: u16,
    /// The tensor's own name.
    pub tensor: Arc<str>,
    /// Index in the tensor table.
    pub tensor_idx: u32,
    /// The expert, for expert weights. Of chunk experts (`_chexps`), the chunk.
    pub expert_id: Option<ExpertId>,
    /// The layer, for tensors named `blk.N.`.
    pub layer_id: Option<LayerId>,
    /// Which matrix of a feed-forward block.
    pub projection: Option<Projection>,
    /// What it is for.
    pub category: Category,
    /// Type of the elements.
    pub ty: GgmlType,
    /// Elements in each dimension of this row: an expert of a stacked tensor has `ne[2]` 1.
    pub ne: [u64; 4],
    /// First byte, counted from the start of the file.
    pub file_offset: u64,
    /// Bytes.
    pub size_bytes: u64,
}

impl OffsetMap {
    /// Makes the map of a model.
    pub fn new(gguf: &Gguf) -> OffsetMap {
        let n_rows = gguf
            .tensors()
            .iter()
            .map(|t| n_stacked(t).unwrap_or(1))
            .sum::<u64>();
        let mut rows = Vec::with_capacity(usize::try_from(n_rows).unwrap_or(0));
        for tensor in gguf.tensors() {
            push_rows(&mut rows, tensor);
        }
        OffsetMap { rows }
    }
}

/// Number of experts stacked in a tensor: its third dimension, if its name is one of expert weights.
/// Of none, the tensor is one row.
pub fn n_stacked(tensor: &Tensor) -> Option<u64> {
    let [_, _, n_expert, rest] = tensor.ne;
    (tensor.n_dims >= 3 && rest == 1 && n_expert > 0 && Role::of(&tensor.name).stacked)
        .then_some(n_expert)
}

fn push_rows(rows: &mut Vec<MapRow>, tensor: &Tensor) {
    let role = Role::of(&tensor.name);
    let whole = MapRow {
        file: tensor.file,
        tensor: tensor.name.as_str().into(),
        tensor_idx: tensor.index,
        expert_id: role.expert_id,
        layer_id: role.layer_id,
        projection: role.projection,
        category: role.category,
        ty: tensor.ty,
        ne: tensor.ne,
        file_offset: tensor.offset,
        size_bytes: tensor.size_bytes,
    };
    let Some(n_expert) = n_stacked(tensor) else {
        rows.push(whole);
        return;
    };
    // A tensor is rows of equal size, so its experts are too.
    let size_bytes = tensor.size_bytes / n_expert;
    rows.extend((0..).zip(0..n_expert).map(|(expert_id, expert)| MapRow {
        expert_id: Some(ExpertId(expert_id)),
        ne: [tensor.ne[0], tensor.ne[1], 1, 1],
        file_offset: tensor.offset + expert * size_bytes,
        size_bytes,
        ..whole.clone()
    }));
}

impl MapRow {
    /// Experts whose biases the row holds, one after the other: stacked biases (`ffn_*_exps.bias`) are one row of the map
    /// with `ne = [n, n_expert]`. `None` for everything else; the name decides, not the shape.
    pub fn n_stacked_biases(&self) -> Option<u64> {
        let is_bias = self.category == Category::ExpertBias && self.tensor.ends_with(".bias");
        (is_bias && self.expert_id.is_none())
            .then_some(self.ne[1])
            .filter(|&n| n > 0)
    }
}

impl Serialize for MapRow {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut row = serializer.serialize_struct("MapRow", 14)?;
        row.serialize_field("file", &self.file)?;
        row.serialize_field("tensor", &*self.tensor)?;
        row.serialize_field("tensor_idx", &self.tensor_idx)?;
        row.serialize_field("expert_id", &self.expert_id)?;
        row.serialize_field("layer_id", &self.layer_id)?;
        row.serialize_field("projection", &self.projection)?;
        row.serialize_field("category", &self.category)?;
        row.serialize_field("type", &self.ty)?;
        row.serialize_field("ne0", &self.ne[0])?;
        row.serialize_field("ne1", &self.ne[1])?;
        row.serialize_field("ne2", &self.ne[2])?;
        row.serialize_field("ne3", &self.ne[3])?;
        row.serialize_field("file_offset", &self.file_offset)?;
        row.serialize_field("size_bytes", &self.size_bytes)?;
        row.end()
    }
}
