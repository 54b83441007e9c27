//! What gate and up read, and how fast the memory is.

use std::collections::{BTreeMap, BTreeSet};

use moe_gguf::experts::ExpertParts;
use moe_gguf::map::{OffsetMap, Projection};
use moe_trace::transfers::Transfer;
use moe_trace::{ExpertId, LayerId};

/// What is known beside the transfers; the default is nothing.
#[derive(Clone, Debug, Default)]
pub struct Reads {
    /// Bytes of gate and up of an expert of each layer, see [`gate_up_bytes`].
    pub gate_up_bytes: BTreeMap<LayerId, f64>,
    /// Measured bandwidth of the host's memory when it is read.
    pub memory_bytes_per_s: Option<f64>,
}

impl Reads {
    /// Bytes that gate and up of a layer read in a pass: each chosen expert once. Where the GPU computes some of them it is
    /// the most that the host can have read.
    pub(super) fn of(&self, transfer: &Transfer) -> Option<f64> {
        let bytes = self.gate_up_bytes.get(&transfer.layer_id)?;
        Some(bytes * f64::from(transfer.n_experts))
    }
}

/// Bytes of gate and up of an expert of each layer, biases included; the mean where experts differ. What is a part of an expert
/// is defined in [`moe_gguf::experts`].
pub fn gate_up_bytes(map: &OffsetMap) -> BTreeMap<LayerId, f64> {
    let parts = ExpertParts::of(map);
    let mut layers: BTreeMap<LayerId, (f64, BTreeSet<ExpertId>)> = BTreeMap::new();
    for row in &map.rows {
        let is_gate_up = matches!(
            row.projection,
            Some(Projection::Gate | Projection::Up | Projection::GateUp)
        );
        if let (Some(layer), true) = (row.layer_id, is_gate_up && parts.contains(row)) {
            let (bytes, experts) = layers.entry(layer).or_default();
            *bytes += row.size_bytes as f64;
            experts.extend(row.expert_id);
        }
    }
    layers.retain(|_, (_, experts)| !experts.is_empty());
    let mean = |(layer, (bytes, experts)): (LayerId, (f64, BTreeSet<ExpertId>))| {
        (layer, bytes / experts.len() as f64)
    };
    layers.into_iter().map(mean).collect()
}
