//! Writing a learn file: the key set and key order of the runtime's serializer, without its timings.

use serde::Serialize;

use super::SCHEMA;

/// What one layer did, as input to [`LearnFile::from_counts`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerCounts {
    /// Block number in the model.
    pub layer: u32,
    /// Passes in which the layer routed something: one for a batch, whatever its number of tokens.
    pub calls: u64,
    /// Times each expert was chosen, by expert id (`[n_expert]`).
    pub experts: Vec<u64>,
}

/// `[expert_id, count]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct ExpertCount(pub u32, pub u64);

/// A learn file as the runtime writes it after a learn run: mode `update`, no hot cache, hence every slot cold.
///
/// Keys are serialized in the order of the fields, which is the runtime's.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LearnFile {
    enabled: bool,
    mode: &'static str,
    schema: &'static str,
    n_expert: u32,
    n_expert_used: u32,
    updates: u64,
    overflow_resets: u64,
    summary: Summary,
    layers: Vec<LearnLayer>,
}

/// Totals over all layers.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Summary {
    layer_calls: u64,
    hot_slot_ratio: f64,
}

/// One layer of a [`LearnFile`].
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LearnLayer {
    layer: u32,
    calls: u64,
    hot_slots_total: u64,
    cold_slots_total: u64,
    hot_slots_per_call: f64,
    cold_slots_per_call: f64,
    hot_slot_ratio: f64,
    experts: Vec<ExpertCount>,
    hot_experts: Vec<ExpertCount>,
    cold_experts: Vec<ExpertCount>,
}

impl LearnFile {
    /// Builds the file from counts. `updates` is the number of passes through the model.
    ///
    /// Layers are put in ascending order; a layer in which nothing was counted is left out, as the runtime does.
    pub fn from_counts(
        n_expert: u32,
        n_expert_used: u32,
        updates: u64,
        layers: impl IntoIterator<Item = LayerCounts>,
    ) -> LearnFile {
        let mut layers: Vec<LearnLayer> = layers
            .into_iter()
            .filter_map(LearnLayer::from_counts)
            .collect();
        layers.sort_by_key(|layer| layer.layer);
        let layer_calls = layers
            .iter()
            .fold(0u64, |calls, layer| calls.saturating_add(layer.calls));
        LearnFile {
            enabled: true,
            mode: "update",
            schema: SCHEMA,
            n_expert,
            n_expert_used,
            updates,
            overflow_resets: 0,
            summary: Summary {
                layer_calls,
                hot_slot_ratio: 0.0,
            },
            layers,
        }
    }

    /// The layers that have data, ascending.
    pub fn layers(&self) -> &[LearnLayer] {
        &self.layers
    }

    /// The file's text: compact JSON, no white space.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("numbers and fixed keys always serialize")
    }
}

impl LearnLayer {
    fn from_counts(counts: LayerCounts) -> Option<LearnLayer> {
        let experts: Vec<ExpertCount> = (0u32..)
            .zip(counts.experts)
            .filter(|&(_, count)| count > 0)
            .map(|(expert, count)| ExpertCount(expert, count))
            .collect();
        if experts.is_empty() {
            return None;
        }
        let slots = experts
            .iter()
            .fold(0u64, |slots, expert| slots.saturating_add(expert.1));
        Some(LearnLayer {
            layer: counts.layer,
            calls: counts.calls,
            hot_slots_total: 0,
            cold_slots_total: slots,
            hot_slots_per_call: 0.0,
            cold_slots_per_call: if counts.calls > 0 {
                slots as f64 / counts.calls as f64
            } else {
                0.0
            },
            hot_slot_ratio: 0.0,
            hot_experts: Vec::new(),
            cold_experts: experts.clone(),
            experts,
        })
    }

    /// Block number in the model.
    pub fn layer(&self) -> u32 {
        self.layer
    }

    /// The experts that were chosen at least once, ids ascending.
    pub fn experts(&self) -> &[ExpertCount] {
        &self.experts
    }
}
