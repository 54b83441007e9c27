//! The experts of each layer in order of their counts.

use std::cmp::Reverse;

use moe_trace::{ExpertId, LayerId};

use super::{Hotness, Phases};

/// One expert of a layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RankedExpert {
    /// Block number in the model.
    pub layer: LayerId,
    /// Expert in the layer.
    pub expert: ExpertId,
    /// Times chosen.
    pub count: u64,
    /// Share of the layer's choices, 0 to 1.
    pub share: f64,
    /// Sum of the router weights with which it was chosen, where they are known.
    pub mass: Option<f64>,
}

impl Hotness {
    /// The experts of each layer that routed something, hottest first.
    ///
    /// Layers ascend; equal counts are in the order of their ids. Experts that were never chosen are included, with count 0.
    pub fn ranked(&self, phases: Phases) -> Vec<RankedExpert> {
        let layers = self.layers(phases).into_iter();
        let ranked = layers.flat_map(|layer| {
            let choices = self.choices(layer, phases) as f64;
            let tallies = (0..).map(ExpertId).zip(self.experts(layer, phases));
            let mut experts: Vec<RankedExpert> = tallies
                .map(|(expert, tally)| RankedExpert {
                    layer,
                    expert,
                    count: tally.count,
                    share: tally.count as f64 / choices,
                    mass: self.has_mass.then_some(tally.mass),
                })
                .collect();
            // Stable: equal counts stay in the order of their ids.
            experts.sort_by_key(|expert| Reverse(expert.count));
            experts
        });
        ranked.collect()
    }
}
