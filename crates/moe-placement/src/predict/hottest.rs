//! Predicts the experts that the layer has selected most often so far.

use std::sync::Arc;

use super::{Predictor, highest};
use crate::cache::{Experts, Key};

/// Selection counts.
pub struct Hottest {
    experts: Arc<Experts>,
    /// `[n_keys]`: selections of each expert.
    counts: Vec<u64>,
}

impl Hottest {
    /// All counts are 0.
    pub fn new(experts: &Arc<Experts>) -> Hottest {
        Hottest {
            counts: vec![0; experts.len()],
            experts: experts.clone(),
        }
    }
}

impl Predictor for Hottest {
    fn observe_prompt(&mut self, layer: usize, selected: &[Key]) {
        self.observe(layer, selected);
    }

    fn observe(&mut self, _layer: usize, selected: &[Key]) {
        for &key in selected {
            self.counts[key as usize] += 1;
        }
    }

    fn predict(&self, layer: usize, n: usize, predicted: &mut Vec<Key>) {
        let keys = self.experts.keys_of(layer);
        highest(
            keys.map(|key| (key, self.counts[key as usize] as f64)),
            n,
            predicted,
        );
    }
}
