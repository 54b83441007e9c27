//! Predictions that somebody else made.

use super::Predictor;
use crate::cache::Key;

/// What will be chosen, by layer and by the layer's passes of generated tokens.
#[derive(Debug, Clone, Default)]
pub struct Given {
    /// `[n_layer][n_passes]`: likeliest first.
    predictions: Vec<Vec<Vec<Key>>>,
    /// `[n_layer]`: passes so far.
    seen: Vec<usize>,
}

impl Given {
    /// Of a model with so many layers that have experts.
    pub fn new(n_layer: usize) -> Given {
        Given {
            predictions: vec![Vec::new(); n_layer],
            seen: vec![0; n_layer],
        }
    }

    /// Adds the prediction for the next pass of a layer that has none.
    pub fn push(&mut self, layer: usize, predicted: Vec<Key>) {
        self.predictions[layer].push(predicted);
    }
}

impl Predictor for Given {
    fn observe(&mut self, layer: usize, _chosen: &[Key]) {
        self.seen[layer] += 1;
    }

    fn predict(&self, layer: usize, n: usize, predicted: &mut Vec<Key>) {
        let next = self.predictions[layer].get(self.seen[layer]);
        predicted.extend(next.into_iter().flatten().take(n));
    }
}
