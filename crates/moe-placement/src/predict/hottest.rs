//! The experts that a layer chose most so far.

use std::sync::Arc;

use super::{Predictor, best};
use crate::cache::{Experts, Key};

/// Counts choices.
pub struct Hottest {
    experts: Arc<Experts>,
    /// `[n_keys]`
    counts: Vec<u64>,
}

impl Hottest {
    /// Nothing counted.
    pub fn new(experts: &Arc<Experts>) -> Hottest {
        Hottest {
            counts: vec![0; experts.len()],
            experts: experts.clone(),
        }
    }
}

impl Predictor for Hottest {
    fn prompt(&mut self, layer: usize, chosen: &[Key]) {
        self.observe(layer, chosen);
    }

    fn observe(&mut self, _layer: usize, chosen: &[Key]) {
        for &key in chosen {
            self.counts[key as usize] += 1;
        }
    }

    fn predict(&self, layer: usize, n: usize, predicted: &mut Vec<Key>) {
        let keys = self.experts.keys_of(layer);
        best(
            keys.map(|key| (key, self.counts[key as usize] as f64)),
            n,
            predicted,
        );
    }
}
