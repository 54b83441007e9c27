//! Predictions from an external predictor, for example a trained model.

use super::Predictor;
use crate::cache::Key;

/// Predictions that were made elsewhere for the passes of generated tokens, by layer and pass.
#[derive(Debug, Clone, Default)]
pub struct ExternalPredictions {
    /// `[n_layer][n_passes]`: keys, most likely first.
    predictions: Vec<Vec<Vec<Key>>>,
    /// `[n_layer]`: number of passes observed.
    seen: Vec<usize>,
}

impl ExternalPredictions {
    /// No predictions yet, for a model with `n_layer` MoE layers.
    pub fn new(n_layer: usize) -> ExternalPredictions {
        ExternalPredictions {
            predictions: vec![Vec::new(); n_layer],
            seen: vec![0; n_layer],
        }
    }

    /// Appends the prediction for the next pass of the layer that has none yet: keys, most likely first.
    ///
    /// # Panics
    /// If `layer` is not below `n_layer`.
    pub fn push(&mut self, layer: usize, predicted: Vec<Key>) {
        self.predictions[layer].push(predicted);
    }
}

impl Predictor for ExternalPredictions {
    fn observe(&mut self, layer: usize, _selected: &[Key]) {
        self.seen[layer] += 1;
    }

    fn predict(&self, layer: usize, n: usize, predicted: &mut Vec<Key>) {
        let next = self.predictions[layer].get(self.seen[layer]);
        predicted.extend(next.into_iter().flatten().take(n));
    }
}
