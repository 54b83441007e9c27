//! Predictions from pairs of experts: of one layer and a later one, or of one layer.

use std::sync::Arc;

use super::{Predictor, best};
use crate::cache::{Experts, Key};

/// How often an expert of a layer came with one of another.
struct Pairs {
    experts: Arc<Experts>,
    /// `[n_keys]`: uses of the first.
    uses: Vec<u32>,
    /// `[n_keys]`: counts of the second, by its place in its layer; empty until used.
    counts: Vec<Vec<u32>>,
}

impl Pairs {
    fn new(experts: &Arc<Experts>) -> Pairs {
        Pairs {
            uses: vec![0; experts.len()],
            counts: vec![Vec::new(); experts.len()],
            experts: experts.clone(),
        }
    }

    /// Counts all pairs; the second ones are of `layer`.
    fn count(&mut self, firsts: &[Key], seconds: &[Key], layer: usize) {
        let keys = self.experts.keys_of(layer);
        for &first in firsts {
            self.uses[first as usize] = self.uses[first as usize].saturating_add(1);
            let counts = &mut self.counts[first as usize];
            counts.resize(keys.len(), 0);
            for &second in seconds {
                let count = &mut counts[(second - keys.start) as usize];
                *count = count.saturating_add(1);
            }
        }
    }

    /// Experts of `layer` by the sum of their shares in what came with each of `firsts`.
    fn predict(&self, firsts: &[Key], layer: usize, n: usize, predicted: &mut Vec<Key>) {
        let keys = self.experts.keys_of(layer);
        let mut scores = vec![0.0; keys.len()];
        for &first in firsts {
            let uses = f64::from(self.uses[first as usize].max(1));
            for (score, &count) in scores.iter_mut().zip(&self.counts[first as usize]) {
                *score += f64::from(count) / uses;
            }
        }
        best(keys.zip(scores), n, predicted);
    }
}

/// From what the layer `depth` layers before chose for this pass.
pub struct Markov {
    pairs: Pairs,
    depth: usize,
    /// `[n_layer]`: the last choice.
    last: Vec<Vec<Key>>,
}

impl Markov {
    /// Nothing counted.
    pub fn new(experts: &Arc<Experts>, depth: usize) -> Markov {
        Markov {
            pairs: Pairs::new(experts),
            depth,
            last: vec![Vec::new(); experts.n_layer()],
        }
    }

    /// The layer that predictions for a layer are made from; beyond the first layer, it is of the pass before.
    fn source(&self, layer: usize) -> usize {
        let n_layer = self.last.len().max(1);
        (layer + n_layer - self.depth % n_layer) % n_layer
    }
}

impl Predictor for Markov {
    fn observe(&mut self, layer: usize, chosen: &[Key]) {
        let source = self.source(layer);
        self.pairs.count(&self.last[source], chosen, layer);
        chosen.clone_into(&mut self.last[layer]);
    }

    fn predict(&self, layer: usize, n: usize, predicted: &mut Vec<Key>) {
        let firsts = &self.last[self.source(layer)];
        self.pairs.predict(firsts, layer, n, predicted);
    }
}

/// From what the layer itself chose for the token before: those experts, and who was chosen along with them.
pub struct CoActivation {
    pairs: Pairs,
    /// `[n_layer]`: the last choice.
    last: Vec<Vec<Key>>,
}

impl CoActivation {
    /// Nothing counted.
    pub fn new(experts: &Arc<Experts>) -> CoActivation {
        CoActivation {
            pairs: Pairs::new(experts),
            last: vec![Vec::new(); experts.n_layer()],
        }
    }
}

impl Predictor for CoActivation {
    fn observe(&mut self, layer: usize, chosen: &[Key]) {
        self.pairs.count(chosen, chosen, layer);
        chosen.clone_into(&mut self.last[layer]);
    }

    fn predict(&self, layer: usize, n: usize, predicted: &mut Vec<Key>) {
        self.pairs.predict(&self.last[layer], layer, n, predicted);
    }
}
