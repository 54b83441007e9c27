//! Sizes of routed experts in bytes.

use std::collections::{BTreeMap, BTreeSet};

use moe_ids::{ExpertId, LayerId};

use crate::gguf::Gguf;
use crate::map::{MapRow, OffsetMap};
use crate::names::{Category, Projection, Role, is_chunked};

/// Returns the size of each routed expert in bytes, by (layer, expert): the stored weights and biases of all its projections.
///
/// This is the size of an expert in the [hot expert cache](https://github.com/adrianhoehne/llama.cpp), a fork of llama.cpp:
/// - A layer without down projections has no experts.
/// - If a layer has fused gate-up tensors, its separate gate and up tensors do not count.
/// - Scales of an expert (`.scale`) and chunk experts (`_chexps`) do not count.
pub fn expert_bytes(map: &OffsetMap) -> BTreeMap<(LayerId, ExpertId), u64> {
    let parts = ExpertParts::of(map);
    let mut bytes: BTreeMap<(LayerId, ExpertId), u64> = BTreeMap::new();
    let mut add = |key, n| {
        let sum = bytes.entry(key).or_default();
        *sum = u64::saturating_add(*sum, n);
    };
    for row in map.rows.iter().filter(|row| parts.contains(row)) {
        let Some(layer) = row.layer_id else { continue };
        match (row.expert_id, row.n_stacked_biases()) {
            (Some(expert), _) => add((layer, expert), row.size_bytes),
            (None, Some(n_expert)) => {
                let experts = parts.experts_of(layer);
                for key in experts.filter(|&(_, expert)| u64::from(expert.0) < n_expert) {
                    add(key, row.size_bytes / n_expert);
                }
            }
            (None, None) => {}
        }
    }
    bytes.retain(|key, _| parts.with_down.contains(key));
    bytes
}

/// Returns the size of one expert in bytes, by layer. Layers whose experts differ in size are omitted.
pub fn expert_bytes_by_layer(map: &OffsetMap) -> BTreeMap<LayerId, u64> {
    let mut layers: BTreeMap<LayerId, Option<u64>> = BTreeMap::new();
    for ((layer, _), bytes) in expert_bytes(map) {
        let size = layers.entry(layer).or_insert(Some(bytes));
        *size = size.filter(|&size| size == bytes);
    }
    let layers = layers.into_iter();
    layers
        .filter_map(|(layer, bytes)| Some((layer, bytes?)))
        .collect()
}

/// Decides which rows of a map belong to routed experts, by the rules of [`expert_bytes`].
#[derive(Clone, Debug, Default)]
pub struct ExpertParts {
    /// Layers with a fused gate-up tensor.
    fused: BTreeSet<LayerId>,
    /// (layer, expert) of all down projections.
    with_down: BTreeSet<(LayerId, ExpertId)>,
}

impl ExpertParts {
    /// Applies the rules to the layers of a map.
    pub fn of(map: &OffsetMap) -> ExpertParts {
        let mut parts = ExpertParts::default();
        let weights = map.rows.iter();
        for row in weights.filter(|row| row.category == Category::Expert) {
            let (Some(layer), Some(expert)) = (row.layer_id, row.expert_id) else {
                continue;
            };
            match row.projection {
                _ if is_chunked(&row.tensor) => {}
                Some(Projection::GateUp) => {
                    parts.fused.insert(layer);
                }
                Some(Projection::Down) => {
                    parts.with_down.insert((layer, expert));
                }
                _ => {}
            }
        }
        parts
    }

    /// Whether a row is part of one expert, or contains the stacked biases of all experts of its layer.
    pub fn contains(&self, row: &MapRow) -> bool {
        let (Some(layer), Some(projection)) = (row.layer_id, row.projection) else {
            return false;
        };
        let is_part = match row.category {
            Category::Expert => row.expert_id.is_some(),
            Category::ExpertBias => row.tensor.ends_with(".bias"),
            _ => false,
        };
        let is_separate = matches!(projection, Projection::Gate | Projection::Up);
        is_part
            && !is_chunked(&row.tensor)
            && !(is_separate && self.fused.contains(&layer))
            && self.experts_of(layer).next().is_some()
    }

    /// Returns the (layer, expert) pairs of a layer.
    fn experts_of(&self, layer: LayerId) -> impl Iterator<Item = (LayerId, ExpertId)> {
        let experts = self
            .with_down
            .range((layer, ExpertId(0))..=(layer, ExpertId(u32::MAX)));
        experts.copied()
    }
}

/// Returns the total size in bytes of the routed experts' tensors by layer, including scales.
///
/// This is the GPU memory that llama.cpp saves if it keeps the experts of the layer on the CPU (`--cpu-moe`, `--n-cpu-moe`).
pub fn expert_layer_bytes(gguf: &Gguf) -> BTreeMap<LayerId, u64> {
    let mut layers = BTreeMap::new();
    for tensor in gguf.tensors() {
        let role = Role::of(&tensor.name);
        if let Some(layer) = role.layer_id
            && matches!(role.category, Category::Expert | Category::ExpertBias)
        {
            // Cannot overflow: the sum of all tensor sizes is below 2^63.
            *layers.entry(layer).or_insert(0) += tensor.size_bytes;
        }
    }
    layers
}
