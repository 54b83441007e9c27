//! Bytes of each expert.

use std::collections::BTreeMap;

use moe_gguf::experts::expert_bytes;
use moe_gguf::map::OffsetMap;
use moe_trace::{ExpertId, LayerId};

/// Bytes of an expert's weights and biases in all projections, by (layer, expert).
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ExpertBytes {
    experts: BTreeMap<(LayerId, ExpertId), u64>,
    /// Layers of which a trace contains one size for all experts.
    layers: BTreeMap<LayerId, u64>,
}

impl ExpertBytes {
    /// Of a model's map.
    pub fn of_map(map: &OffsetMap) -> ExpertBytes {
        ExpertBytes {
            experts: expert_bytes(map),
            ..ExpertBytes::default()
        }
    }

    /// One size for all experts of a layer.
    pub fn of_layers(layers: impl IntoIterator<Item = (LayerId, u64)>) -> ExpertBytes {
        ExpertBytes {
            layers: layers.into_iter().collect(),
            ..ExpertBytes::default()
        }
    }

    /// Whether nothing is known.
    pub fn is_empty(&self) -> bool {
        self.experts.is_empty() && self.layers.is_empty()
    }

    /// Bytes of an expert, if known.
    pub fn get(&self, layer: LayerId, expert: ExpertId) -> Option<u64> {
        let own = self.experts.get(&(layer, expert));
        own.or_else(|| self.layers.get(&layer)).copied()
    }
}
