//! How many bytes each routed expert takes.

use std::collections::BTreeMap;

use crate::gguf::{Gguf, Tensor};
use crate::map::n_stacked;
use crate::names::{Category, Projection, Role, is_chunked};

/// Bytes of one routed expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertSize {
    /// The layer.
    pub layer: u16,
    /// The expert within its layer.
    pub expert: u32,
    /// Bytes of its rows in every projection's weights and biases.
    pub bytes: u64,
}

/// Bytes of each matrix of an expert, by [`Projection`].
type Projections = BTreeMap<Projection, u64>;

/// The weights and biases of each routed expert, layers and experts ascending, each in its tensor's own type.
///
/// Counted as llama.cpp's hot-cache fork does, which copies so much for an expert: a layer without down projection has no
/// experts; where gate and up are one tensor, separate ones do not count; scales of a whole expert and chunk experts do not
/// count either.
pub fn expert_sizes(gguf: &Gguf) -> Vec<ExpertSize> {
    // Tensors that hold a part of every expert of a layer, and how many experts that are.
    let mut stacked: BTreeMap<u16, (u64, Projections)> = BTreeMap::new();
    // Experts in tensors of their own, as older converters wrote them.
    let mut single: BTreeMap<(u16, u32), Projections> = BTreeMap::new();
    for tensor in gguf.tensors() {
        let role = Role::of(&tensor.name);
        let (Some(layer), Some(projection)) = (role.layer_id, role.projection) else {
            continue;
        };
        let is_bias = role.category == Category::ExpertBias && tensor.name.ends_with(".bias");
        if !(role.category == Category::Expert || is_bias) || is_chunked(&tensor.name) {
            continue;
        }
        let (parts, bytes) = match (role.expert_id, share(tensor, is_bias)) {
            (Some(expert), _) => {
                let parts = single.entry((layer, expert)).or_default();
                (parts, tensor.size_bytes)
            }
            (None, Some((n_expert, bytes))) => {
                let (n, parts) = stacked.entry(layer).or_default();
                if projection == Projection::Down && !is_bias {
                    *n = n_expert;
                }
                (parts, bytes)
            }
            (None, None) => continue,
        };
        let sum = parts.entry(projection).or_default();
        *sum = sum.saturating_add(bytes);
    }

    let mut sizes: BTreeMap<(u16, u32), u64> = BTreeMap::new();
    for (key, parts) in &single {
        if parts.contains_key(&Projection::Down) {
            sizes.insert(*key, total(parts));
        }
    }
    for (layer, (n_expert, parts)) in &stacked {
        let bytes = total(parts);
        // No more experts than the limit on the rows of the map.
        sizes.extend((0..*n_expert).map(|expert| ((*layer, expert as u32), bytes)));
    }
    sizes
        .into_iter()
        .map(|((layer, expert), bytes)| ExpertSize {
            layer,
            expert,
            bytes,
        })
        .collect()
}

/// Bytes of all tensors of a layer's routed experts, scales included: what leaves the GPU when llama.cpp keeps the experts
/// of the layer on the CPU.
pub fn expert_layer_bytes(gguf: &Gguf) -> BTreeMap<u16, u64> {
    let mut layers = BTreeMap::new();
    for tensor in gguf.tensors() {
        let role = Role::of(&tensor.name);
        if let Some(layer) = role.layer_id
            && matches!(role.category, Category::Expert | Category::ExpertBias)
        {
            // Sizes add up in 63 bits over all tensors.
            *layers.entry(layer).or_insert(0) += tensor.size_bytes;
        }
    }
    layers
}

/// Experts in a stacked tensor and the bytes of each: weights are stacked in the third dimension, biases in the second.
fn share(tensor: &Tensor, is_bias: bool) -> Option<(u64, u64)> {
    let n_expert = if is_bias {
        Some(tensor.ne[1]).filter(|&n| n > 0)?
    } else {
        n_stacked(tensor)?
    };
    Some((n_expert, tensor.size_bytes / n_expert))
}

fn total(parts: &Projections) -> u64 {
    let is_fused = parts.contains_key(&Projection::GateUp);
    let counts = |projection: &Projection| {
        !is_fused || !matches!(projection, Projection::Gate | Projection::Up)
    };
    let parts = parts.iter().filter(|(projection, _)| counts(projection));
    parts.fold(0, |sum, (_, bytes)| sum.saturating_add(*bytes))
}
