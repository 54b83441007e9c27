//! Bytes that gate and up read, and the memory bandwidth.

use std::collections::{BTreeMap, BTreeSet};

use moe_gguf::experts::ExpertParts;
use moe_gguf::map::{OffsetMap, Projection};
use moe_trace::transfers::Transfer;
use moe_trace::{ExpertId, LayerId};

/// Known properties of the model and the machine. By default nothing is known.
#[derive(Clone, Debug, Default)]
pub struct MemoryTraffic {
    /// Mean bytes of gate and up per expert of each layer, see [`gate_up_bytes`].
    pub gate_up_bytes: BTreeMap<LayerId, f64>,
    /// Measured read bandwidth of CPU memory in bytes/s.
    pub memory_bytes_per_s: Option<f64>,
}

impl MemoryTraffic {
    /// Bytes that gate and up of a layer read in a pass: those of each selected expert, once. If the GPU computes some
    /// experts, it is an upper bound for the CPU.
    pub(super) fn gate_up_bytes_of(&self, transfer: &Transfer) -> Option<f64> {
        let bytes = self.gate_up_bytes.get(&transfer.layer_id)?;
        Some(bytes * f64::from(transfer.n_experts))
    }
}

/// Mean bytes of gate and up per expert of each layer, biases included. [`moe_gguf::experts`] defines the parts of an
/// expert.
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
