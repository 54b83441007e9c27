//! How the layers lie in the files: in which order, and what reading them in order of execution
//! costs.

use moe_ids::LayerId;
use serde::Serialize;

use crate::gguf::{Gguf, Tensor};
use crate::names::Role;

/// How the layers of a model lie in its files.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LayerOrder {
    /// The layers, by where their first byte lies.
    pub order: Vec<LayerId>,
    /// Whether `order` is `0, 1, 10, 11, … 2`: sorted as strings, where numbers were meant.
    pub string_sorted: bool,
    /// Where each layer lies, in numerical order.
    pub layers: Vec<LayerExtent>,
    /// Jumps of a reader that takes the layers in numerical order, each layer's tensors in the order
    /// in which they lie. Padding is no jump.
    pub seeks: u64,
    /// Bytes jumped over, forward and backward; jumps to another file count none.
    pub seek_bytes: u64,
}

/// Where a layer lies.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LayerExtent {
    /// The layer.
    pub layer_id: LayerId,
    /// File of its first byte.
    pub file: u16,
    /// Its first byte.
    pub offset: u64,
    /// Bytes of its tensors.
    pub size_bytes: u64,
    /// Pieces in which it lies: 1 if nothing lies between its tensors.
    pub pieces: u32,
}

impl LayerOrder {
    /// Whether the layers lie in the order in which they are executed, each in one piece.
    pub fn is_sequential(&self) -> bool {
        self.order.is_sorted() && self.layers.iter().all(|layer| layer.pieces == 1)
    }
}

/// Looks at how the layers of a model lie. Reads no data.
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
        let jump = last.and_then(|last| jump(gguf, last, tensor));
        seeks += u64::from(jump.is_some());
        seek_bytes = jump.unwrap_or(0).saturating_add(seek_bytes);
        last = Some(tensor);
        match layers.last_mut().filter(|layer| layer.layer_id == layer_id) {
            Some(layer) => {
                layer.size_bytes += tensor.size_bytes;
                layer.pieces += u32::from(jump.is_some());
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

    let mut by_place: Vec<&LayerExtent> = layers.iter().collect();
    by_place.sort_by_key(|layer| (layer.file, layer.offset));
    let order: Vec<LayerId> = by_place.iter().map(|layer| layer.layer_id).collect();
    let string_sorted = !order.is_sorted() && order.is_sorted_by_key(LayerId::to_string);
    LayerOrder {
        order,
        string_sorted,
        layers,
        seeks,
        seek_bytes,
    }
}

/// Bytes between the end of a tensor and the beginning of the one read next; `None` where only
/// padding lies between them.
fn jump(gguf: &Gguf, from: &Tensor, to: &Tensor) -> Option<u64> {
    if from.file != to.file {
        return Some(0);
    }
    let end = from.offset + from.size_bytes;
    let alignment = gguf.files().get(usize::from(from.file))?.alignment;
    let adjacent = (end..=end.next_multiple_of(alignment)).contains(&to.offset);
    (!adjacent).then(|| to.offset.abs_diff(end))
}
