//! Sizes of experts.

use std::collections::BTreeMap;

use moe_gguf::experts::expert_bytes;
use moe_gguf::map::OffsetMap;
use moe_trace::{ExpertId, LayerId};

/// Sizes of experts in bytes: weights and biases of all projections.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ExpertBytes {
    experts: BTreeMap<(LayerId, ExpertId), u64>,
    /// Size of every expert of a layer, for traces that contain one size per layer.
    layers: BTreeMap<LayerId, u64>,
}

impl ExpertBytes {
    /// Sizes from the offset map of a model.
    pub fn from_map(map: &OffsetMap) -> ExpertBytes {
        ExpertBytes {
            experts: expert_bytes(map),
            ..ExpertBytes::default()
        }
    }

    /// One size for all experts of each layer.
    pub fn from_layers(layers: impl IntoIterator<Item = (LayerId, u64)>) -> ExpertBytes {
        ExpertBytes {
            layers: layers.into_iter().collect(),
            ..ExpertBytes::default()
        }
    }

    /// Whether no size is known.
    pub fn is_empty(&self) -> bool {
        self.experts.is_empty() && self.layers.is_empty()
    }

    /// Size of an expert, if it is known.
    pub fn get(&self, layer: LayerId, expert: ExpertId) -> Option<u64> {
        let own = self.experts.get(&(layer, expert));
        own.or_else(|| self.layers.get(&layer)).copied()
    }
}
