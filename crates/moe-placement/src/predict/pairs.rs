//! Predictions from pairs of experts: of two layers ([`Markov`]), or of one layer ([`CoActivation`]).

use std::sync::Arc;

use super::{Predictor, highest};
use crate::cache::{Experts, Key};

/// Counts of pairs (first, second): how often `second` was selected after or together with `first`.
struct Pairs {
    experts: Arc<Experts>,
    /// `[n_keys]`: number of uses of each first expert.
    uses: Vec<u32>,
    /// `[n_keys][n_expert of the layer]`: counts of each second expert; empty until the first expert is used.
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

    /// Counts all pairs of `firsts` and `seconds`; `layer` is the layer of `seconds`.
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

    /// Appends up to `n` experts of `layer` by the score Σ count(first, expert) / uses(first) over `firsts`.
    fn predict(&self, firsts: &[Key], layer: usize, n: usize, predicted: &mut Vec<Key>) {
        let keys = self.experts.keys_of(layer);
        let mut scores = vec![0.0; keys.len()];
        for &first in firsts {
            let uses = f64::from(self.uses[first as usize].max(1));
            for (score, &count) in scores.iter_mut().zip(&self.counts[first as usize]) {
                *score += f64::from(count) / uses;
            }
        }
        highest(keys.zip(scores), n, predicted);
    }
}

/// Predicts from the selection of the layer that is `depth` layers earlier in the same pass.
pub struct Markov {
    pairs: Pairs,
    depth: usize,
    /// `[n_layer]`: selection in the last pass.
    last: Vec<Vec<Key>>,
}

impl Markov {
    /// All counts are 0.
    pub fn new(experts: &Arc<Experts>, depth: usize) -> Markov {
        Markov {
            pairs: Pairs::new(experts),
            depth,
            last: vec![Vec::new(); experts.n_layer()],
        }
    }

    /// Layer whose selection predicts `layer`. If it is before the first layer, it wraps around to the previous pass.
    fn source(&self, layer: usize) -> usize {
        let n_layer = self.last.len().max(1);
        (layer + n_layer - self.depth % n_layer) % n_layer
    }
}

impl Predictor for Markov {
    fn observe(&mut self, layer: usize, selected: &[Key]) {
        let source = self.source(layer);
        self.pairs.count(&self.last[source], selected, layer);
        selected.clone_into(&mut self.last[layer]);
    }

    fn predict(&self, layer: usize, n: usize, predicted: &mut Vec<Key>) {
        let firsts = &self.last[self.source(layer)];
        self.pairs.predict(firsts, layer, n, predicted);
    }
}

/// Predicts from the layer's own selection for the previous token, and from co-selected experts.
pub struct CoActivation {
    pairs: Pairs,
    /// `[n_layer]`: selection in the last pass.
    last: Vec<Vec<Key>>,
}

impl CoActivation {
    /// All counts are 0.
    pub fn new(experts: &Arc<Experts>) -> CoActivation {
        CoActivation {
            pairs: Pairs::new(experts),
            last: vec![Vec::new(); experts.n_layer()],
        }
    }
}

impl Predictor for CoActivation {
    fn observe(&mut self, layer: usize, selected: &[Key]) {
        self.pairs.count(selected, selected, layer);
        selected.clone_into(&mut self.last[layer]);
    }

    fn predict(&self, layer: usize, n: usize, predicted: &mut Vec<Key>) {
        self.pairs.predict(&self.last[layer], layer, n, predicted);
    }
}
