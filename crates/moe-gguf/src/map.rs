//! The offset map: the bytes of each tensor and expert.

use std::sync::Arc;

use moe_ids::{ExpertId, LayerId};
use serde::ser::SerializeStruct;
use serde::{Serialize, Serializer};

use crate::gguf::{Gguf, Tensor};
use crate::names::Role;
use crate::types::GgmlType;

pub use crate::names::{Category, Projection};

/// The offset map of a model. Its rows are in the order of the tensor table; the rows of a tensor cover it exactly.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OffsetMap {
    /// One row per expert for stacked expert weights, one row per tensor for all other tensors.
    pub rows: Vec<MapRow>,
}

/// A byte range of a file: a tensor, or one expert of a stacked tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MapRow {
    /// Index of the file in [`Gguf::files`].
    pub file: u16,
    /// Name of the tensor.
    pub tensor: Arc<str>,
    /// Index of the tensor in the tensor table.
    pub tensor_idx: u32,
    /// The expert, for expert weights; for chunk experts (`_chexps`), the chunk; `None` for all other tensors.
    pub expert_id: Option<ExpertId>,
    /// The layer, for tensors named `blk.N.…`; otherwise `None`.
    pub layer_id: Option<LayerId>,
    /// Which matrix of a feed-forward block the tensor is; `None` for other tensors.
    pub projection: Option<Projection>,
    /// The purpose of the tensor.
    pub category: Category,
    /// Type of the elements.
    pub ty: GgmlType,
    /// Number of elements of the row in each dimension: `ne[2]` is 1 for an expert of a stacked tensor.
    pub ne: [u64; 4],
    /// Offset from the start of the file, in bytes.
    pub file_offset: u64,
    /// Size in bytes.
    pub size_bytes: u64,
}

impl OffsetMap {
    /// Returns the map of a model.
    pub fn new(gguf: &Gguf) -> OffsetMap {
        let n_rows = gguf
            .tensors()
            .iter()
            .map(|t| t.n_stacked().unwrap_or(1))
            .sum::<u64>();
        let mut rows = Vec::with_capacity(usize::try_from(n_rows).unwrap_or(0));
        for tensor in gguf.tensors() {
            push_rows(&mut rows, tensor);
        }
        OffsetMap { rows }
    }

    /// Returns the map of a model and its adapters. The files and tensors of an adapter are numbered after those of the model and of the
    /// adapters before it, see [`Start::of_adapters`].
    pub fn with_adapters(model: &Gguf, adapters: &[&Gguf]) -> OffsetMap {
        let mut map = OffsetMap::new(model);
        let starts = Start::of_adapters(model, adapters.iter().copied());
        for (adapter, start) in adapters.iter().zip(starts) {
            let rows = OffsetMap::new(adapter).rows.into_iter();
            map.rows.extend(rows.map(|row| MapRow {
                file: start.file.saturating_add(row.file),
                tensor_idx: start.tensor_idx.saturating_add(row.tensor_idx),
                ..row
            }));
        }
        map
    }
}

/// The numbers of the first file and the first tensor of an adapter in maps and traces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Start {
    /// Number of its first file.
    pub file: u16,
    /// Number of its first tensor.
    pub tensor_idx: u32,
}

impl Start {
    /// Returns the starts of adapters of a model: the numbers continue those of the model and of the adapters before it.
    pub fn of_adapters<'a>(
        model: &Gguf,
        adapters: impl IntoIterator<Item = &'a Gguf>,
    ) -> Vec<Start> {
        let (mut n_files, mut n_tensors) = (model.files().len(), model.tensors().len());
        let start = |adapter: &Gguf| {
            let start = Start {
                file: u16::try_from(n_files).unwrap_or(u16::MAX),
                tensor_idx: u32::try_from(n_tensors).unwrap_or(u32::MAX),
            };
            n_files += adapter.files().len();
            n_tensors += adapter.tensors().len();
            start
        };
        adapters.into_iter().map(start).collect()
    }
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
    let Some(n_expert) = tensor.n_stacked() else {
        rows.push(whole);
        return;
    };
    // Exact: all rows of a tensor, and therefore all experts, have the same size.
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
    /// Returns the number of experts if the row contains stacked biases, otherwise `None`.
    ///
    /// Stacked biases (`ffn_*_exps.bias`) are one row of the map with `ne = [n, n_expert]`. The name decides, not the shape.
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
