//! Coverage: experts that are read at least once.

use std::collections::BTreeMap;

use super::Event;
use super::units::Units;
use moe_trace::LayerId;

/// Numbers of experts of a layer that were read at least once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LayerCoverage {
    /// Block number.
    pub layer: LayerId,
    /// Number of experts of the layer.
    pub n_expert: u64,
    /// Number of experts read during prompt passes.
    pub prompt: u64,
    /// Number of experts read during passes of generated tokens.
    pub generate: u64,
    /// Number of experts read in at least one of the phases.
    pub either: u64,
}

pub(super) struct Coverage {
    /// `[n_units][phase]`: whether the unit was read.
    touched: Vec<[bool; 2]>,
}

impl Coverage {
    pub(super) fn new(n_units: usize) -> Self {
        Self {
            touched: vec![[false; 2]; n_units],
        }
    }

    pub(super) fn access(&mut self, event: &Event) {
        if let Some(touched) = self.touched.get_mut(event.unit) {
            touched[usize::from(event.phase.number())] = true;
        }
    }

    pub(super) fn finish(self, units: &Units) -> Vec<LayerCoverage> {
        let mut layers: BTreeMap<LayerId, LayerCoverage> = BTreeMap::new();
        for (unit, &[prompt, generate]) in self.touched.iter().enumerate() {
            let (Some(layer), Some(_)) = (units.layer(unit), units.expert(unit)) else {
                continue;
            };
            let coverage = layers.entry(layer).or_default();
            coverage.layer = layer;
            coverage.n_expert += 1;
            coverage.prompt += u64::from(prompt);
            coverage.generate += u64::from(generate);
            coverage.either += u64::from(prompt || generate);
        }
        layers.into_values().collect()
    }
}
