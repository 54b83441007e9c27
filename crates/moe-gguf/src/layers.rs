//! The order of layers in the files, and the seeks of a reader that reads them in order of execution.

use moe_ids::LayerId;
use serde::Serialize;

use crate::gguf::{Gguf, Tensor};
use crate::names::Role;

/// The order of the layers of a model in its files.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LayerOrder {
    /// The layers, ordered by the offset of their first byte.
    pub order: Vec<LayerId>,
    /// Whether `order` is sorted by the decimal text of the layer numbers (`0, 1, 10, 11, … 2`) instead of by their value.
    pub string_sorted: bool,
    /// The extent of each layer, in numerical order.
    pub layers: Vec<LayerExtent>,
    /// Number of seeks of a reader that reads the layers in numerical order, and the tensors of a layer in file order.
    /// Skipping padding is not a seek.
    pub seeks: u64,
    /// Total seek distance in bytes, forward and backward. A seek to another file has distance 0.
    pub seek_bytes: u64,
}

/// Where the tensors of a layer are in the files.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LayerExtent {
    /// The layer.
    pub layer_id: LayerId,
    /// Index of the file of its first byte.
    pub file: u16,
    /// Offset of its first byte from the start of that file.
    pub offset: u64,
    /// Sum of the sizes of its tensors in bytes.
    pub size_bytes: u64,
    /// Number of contiguous byte ranges of its tensors: 1 if only padding is between them.
    pub pieces: u32,
}

impl LayerOrder {
    /// Whether the layers are stored in order of execution, each in one piece.
    pub fn is_sequential(&self) -> bool {
        self.order.is_sorted() && self.layers.iter().all(|layer| layer.pieces == 1)
    }
}

/// Returns the order of the layers of a model in its files. Does not read tensor data.
pub fn layer_order(gguf: &Gguf) -> LayerOrder {
    let mut tensors: Vec<(LayerId, &Tensor)> = gguf
        .tensors()
        .iter()
        .filter(|t| t.size_bytes > 0)
        .filter_map(|t| Some((Role::of(&t.name).layer_id?, t)))
        .collect();
    tensors.sort_by_key(|(layer, t)| (*layer, t.file, t.offset));

    let mut layers: Vec<LayerExtent> = Vec::new();
    let (mut seeks, mut seek_bytes) = (0, 0_u64);
    let mut last: Option<&Tensor> = None;
    for &(layer_id, tensor) in &tensors {
        let seek = last.and_then(|last| seek_distance(gguf, last, tensor));
        seeks += u64::from(seek.is_some());
        seek_bytes = seek.unwrap_or(0).saturating_add(seek_bytes);
        last = Some(tensor);
        match layers.last_mut().filter(|layer| layer.layer_id == layer_id) {
            Some(layer) => {
                layer.size_bytes += tensor.size_bytes;
                layer.pieces += u32::from(seek.is_some());
            }
            None => layers.push(LayerExtent {
                layer_id,
                file: tensor.file,
                offset: tensor.offset,
                size_bytes: tensor.size_bytes,
                pieces: 1,
            }),
        }
    }

    let mut by_offset: Vec<&LayerExtent> = layers.iter().collect();
    by_offset.sort_by_key(|layer| (layer.file, layer.offset));
    let order: Vec<LayerId> = by_offset.iter().map(|layer| layer.layer_id).collect();
    let string_sorted = !order.is_sorted() && order.is_sorted_by_key(LayerId::to_string);
    LayerOrder {
        order,
        string_sorted,
        layers,
        seeks,
        seek_bytes,
    }
}

/// Returns the bytes between the end of `from` and the start of `to`, or `None` if only padding is between them.
fn seek_distance(gguf: &Gguf, from: &Tensor, to: &Tensor) -> Option<u64> {
    if from.file != to.file {
        return Some(0);
    }
    let end = from.offset + from.size_bytes;
    let alignment = gguf.files().get(usize::from(from.file))?.alignment;
    let adjacent = (end..=end.next_multiple_of(alignment)).contains(&to.offset);
    (!adjacent).then(|| to.offset.abs_diff(end))
}
