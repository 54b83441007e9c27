//! The experts of the token before.

use super::Predictor;
use crate::cache::Key;

/// Remembers each layer's last choice.
pub struct Previous {
    /// `[n_layer]`
    last: Vec<Vec<Key>>,
}

impl Previous {
    /// Of a model with so many layers that have experts.
    pub fn new(n_layer: usize) -> Previous {
        Previous {
            last: vec![Vec::new(); n_layer],
        }
    }
}

impl Predictor for Previous {
    fn observe(&mut self, layer: usize, chosen: &[Key]) {
        chosen.clone_into(&mut self.last[layer]);
    }

    fn predict(&self, layer: usize, n: usize, predicted: &mut Vec<Key>) {
        predicted.extend(self.last[layer].iter().take(n));
    }
}
