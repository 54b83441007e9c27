//! Predicts the experts of the previous token.

use super::Predictor;
use crate::cache::Key;

/// Last selection of each layer.
pub struct Previous {
    /// `[n_layer]`: selection in the last pass.
    last: Vec<Vec<Key>>,
}

impl Previous {
    /// No selections yet, for a model with `n_layer` MoE layers.
    pub fn new(n_layer: usize) -> Previous {
        Previous {
            last: vec![Vec::new(); n_layer],
        }
    }
}

impl Predictor for Previous {
    fn observe(&mut self, layer: usize, selected: &[Key]) {
        selected.clone_into(&mut self.last[layer]);
    }

    fn predict(&self, layer: usize, n: usize, predicted: &mut Vec<Key>) {
        predicted.extend(self.last[layer].iter().take(n));
    }
}
