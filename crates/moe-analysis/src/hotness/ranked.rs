//! Experts of each layer, ordered by their counts.

use std::cmp::Reverse;

use moe_trace::{ExpertId, LayerId};

use super::Hotness;
use crate::phases::Phases;

/// An expert of a layer, with its count.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RankedExpert {
    /// Block number in the model.
    pub layer: LayerId,
    /// Expert id within the layer.
    pub expert: ExpertId,
    /// Number of selections.
    pub count: u64,
    /// Fraction of the layer's selections, 0.0 to 1.0.
    pub share: f64,
    /// Sum of the router weights of the selections, if all weights are known.
    pub mass: Option<f64>,
}

impl Hotness {
    /// Experts of each layer with routed tokens, hottest first. Layers are in ascending order, ties are sorted by expert id.
    /// Experts without selections are included.
    pub fn ranked(&self, phases: Phases) -> Vec<RankedExpert> {
        let layers = self.layers(phases).into_iter();
        let ranked = layers.flat_map(|layer| {
            let selections = self.selections(layer, phases) as f64;
            let tallies = (0..).map(ExpertId).zip(self.experts(layer, phases));
            let mut experts: Vec<RankedExpert> = tallies
                .map(|(expert, tally)| RankedExpert {
                    layer,
                    expert,
                    count: tally.count,
                    share: tally.count as f64 / selections,
                    mass: self.has_mass.then_some(tally.mass),
                })
                .collect();
            // The sort is stable: ties keep the order of their ids.
            experts.sort_by_key(|expert| Reverse(expert.count));
            experts
        });
        ranked.collect()
    }
}
