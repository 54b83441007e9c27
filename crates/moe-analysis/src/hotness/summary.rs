//! Summary of the load balance of layers.

use super::Hotness;
use crate::measures::{LoadBalance, hottest};
use crate::phases::Phases;
use moe_trace::{ExpertId, LayerId};

/// Load balance of one layer.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerSummary {
    /// Block number in the model.
    pub layer: LayerId,
    /// Number of routed tokens.
    pub tokens: u64,
    /// `(expert, fraction of the layer's selections)`, hottest first.
    pub top: Vec<(ExpertId, f64)>,
    /// Load balance measures.
    pub load_balance: LoadBalance,
}

impl Hotness {
    /// Summary of each layer with routed tokens, with its `n_top` hottest experts.
    pub fn summary(&self, phases: Phases, n_top: usize) -> Vec<LayerSummary> {
        self.layers(phases)
            .into_iter()
            .map(|layer| {
                let counts = self.counts(layer, phases);
                let load_balance = LoadBalance::of(&counts);
                let share =
                    |expert| counts[expert] as f64 / load_balance.n_selections.max(1) as f64;
                let top = hottest(&counts, n_top).into_iter();
                LayerSummary {
                    layer,
                    tokens: self.routed_tokens(layer, phases),
                    top: top
                        .map(|expert| (ExpertId(expert as u32), share(expert)))
                        .collect(),
                    load_balance,
                }
            })
            .collect()
    }

    /// Load balance over all (layer, expert) pairs of layers with routed tokens, as relevant to a cache that all layers
    /// share.
    pub fn overall(&self, phases: Phases) -> LoadBalance {
        let layers = self.layers(phases).into_iter();
        let counts: Vec<u64> = layers
            .flat_map(|layer| self.counts(layer, phases))
            .collect();
        LoadBalance::of(&counts)
    }

    /// Number of selections of each expert of a layer (`[n_expert]`).
    pub fn counts(&self, layer: LayerId, phases: Phases) -> Vec<u64> {
        let experts = self.experts(layer, phases).into_iter();
        experts.map(|tally| tally.count).collect()
    }
}
