//! A few numbers that tell how evenly a layer uses its experts.

use super::{Hotness, Phases};
use crate::measures::{Spread, hottest};
use moe_trace::{ExpertId, LayerId};

/// How one layer spreads its choices.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerSummary {
    /// Block number in the model.
    pub layer: LayerId,
    /// Tokens routed.
    pub rows: u64,
    /// `(expert, share of the layer's choices)`, hottest first.
    pub top: Vec<(ExpertId, f64)>,
    /// How evenly the choices fall.
    pub spread: Spread,
}

impl Hotness {
    /// One summary for each layer that routed something, with its `n_top` hottest experts.
    pub fn summary(&self, phases: Phases, n_top: usize) -> Vec<LayerSummary> {
        self.layers(phases)
            .into_iter()
            .map(|layer| {
                let counts = self.counts(layer, phases);
                let spread = Spread::of(&counts);
                let share = |expert| counts[expert] as f64 / spread.choices.max(1) as f64;
                let top = hottest(&counts, n_top).into_iter();
                LayerSummary {
                    layer,
                    rows: self.rows(layer, phases),
                    top: top
                        .map(|expert| (ExpertId(expert as u32), share(expert)))
                        .collect(),
                    spread,
                }
            })
            .collect()
    }

    /// The spread over all slots, layer × expert, of the layers that routed something: what a cache sees that holds experts of
    /// whichever layer.
    pub fn overall(&self, phases: Phases) -> Spread {
        let layers = self.layers(phases).into_iter();
        let counts: Vec<u64> = layers
            .flat_map(|layer| self.counts(layer, phases))
            .collect();
        Spread::of(&counts)
    }

    /// Count of each expert of a layer (`[n_expert]`).
    pub fn counts(&self, layer: LayerId, phases: Phases) -> Vec<u64> {
        let experts = self.experts(layer, phases).into_iter();
        experts.map(|tally| tally.count).collect()
    }
}
