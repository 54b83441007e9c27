//! Experts that are loaded before their layer selects them.

use super::Predictor;
use crate::cache::Key;

/// Prefetched experts of each layer, until the layer runs. `T` describes a load: its end in a simulation, its slot in a cache.
///
/// After a layer has routed, the experts predicted for the layer `depth` layers later are loaded into memory of their own, unless the
/// cache contains them. They stay there until that layer has routed: then selected experts move to the cache, and the others
/// are dropped.
#[derive(Debug, Clone)]
pub struct Prefetches<T> {
    depth: usize,
    n_predict: Option<usize>,
    /// `[n_layer]`: predictions for the next pass of the layer.
    predicted: Vec<Vec<Key>>,
    /// `[n_layer]`: prefetched experts.
    loads: Vec<Vec<(Key, T)>>,
    counts: PrefetchCounts,
}

/// Counts of predictions, which do not depend on the speed of loads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PrefetchCounts {
    /// Passes of a layer with generated tokens.
    pub passes: u64,
    /// Predicted experts, whether or not they were in the cache.
    pub predicted: u64,
    /// Predicted experts that were selected.
    pub correct: u64,
    /// Prefetched experts that were not used.
    pub wasted: u64,
}

impl<T> Prefetches<T> {
    /// No prefetches yet, for a model with `n_layer` MoE layers.
    ///
    /// - `depth`: number of layers to predict ahead, from 1 to `n_layer` - 1.
    /// - `n_predict`: experts to predict for a layer; `None`: as many as the predicting layer has selected.
    pub fn new(n_layer: usize, depth: usize, n_predict: Option<usize>) -> Prefetches<T> {
        Prefetches {
            depth,
            n_predict,
            predicted: vec![Vec::new(); n_layer],
            loads: std::iter::repeat_with(Vec::new).take(n_layer).collect(),
            counts: PrefetchCounts::default(),
        }
    }

    /// Whether an expert of a layer is prefetched.
    pub fn contains(&self, layer: usize, key: Key) -> bool {
        self.loads[layer].iter().any(|&(other, _)| other == key)
    }

    /// Removes and returns the load of an expert that its layer has selected.
    pub fn take(&mut self, layer: usize, key: Key) -> Option<T> {
        let loads = &mut self.loads[layer];
        let index = loads.iter().position(|&(other, _)| other == key)?;
        Some(loads.swap_remove(index).1)
    }

    /// Ends a pass of a layer that has looked up the experts `selected`. Returns the prefetched experts that it did not
    /// [take](Prefetches::take).
    pub fn end_pass(&mut self, layer: usize, selected: &[Key]) -> std::vec::Drain<'_, (Key, T)> {
        let counts = &mut self.counts;
        counts.passes += 1;
        counts.wasted += self.loads[layer].len() as u64;
        let predicted = std::mem::take(&mut self.predicted[layer]);
        let correct = predicted.iter().filter(|key| selected.contains(key));
        counts.predicted += predicted.len() as u64;
        counts.correct += correct.count() as u64;
        self.loads[layer].drain(..)
    }

    /// Requests the experts that are predicted after `layer` has selected `n_selected` experts. `load` is called for each that
    /// is neither in the cache (`holds`) nor prefetched, most likely first.
    pub fn request(
        &mut self,
        layer: usize,
        n_selected: usize,
        predictor: &dyn Predictor,
        holds: impl Fn(Key) -> bool,
        mut load: impl FnMut(Key) -> T,
    ) {
        let target = (layer + self.depth) % self.loads.len();
        let mut predicted = Vec::new();
        predictor.predict(target, self.n_predict.unwrap_or(n_selected), &mut predicted);
        for &key in &predicted {
            if !holds(key) && !self.contains(target, key) {
                let loaded = load(key);
                self.loads[target].push((key, loaded));
            }
        }
        self.predicted[target] = predicted;
    }

    /// Counts so far. Prefetched experts whose layer has not run since are wasted.
    pub fn counts(&self) -> PrefetchCounts {
        let unused = self.loads.iter().map(|loads| loads.len() as u64);
        PrefetchCounts {
            wasted: self.counts.wasted + unused.sum::<u64>(),
            ..self.counts
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::predict::ExternalPredictions;

    #[test]
    fn prefetched_experts_are_taken_or_dropped() {
        // Two layers; keys 0 to 3 and 4 to 7.
        let mut predictions = ExternalPredictions::new(2);
        predictions.push(1, vec![5, 6, 7]);
        let mut prefetches = Prefetches::new(2, 1, Some(3));
        let mut loads = Vec::new();
        prefetches.request(0, 2, &predictions, |key| key == 6, |key| loads.push(key));
        assert_eq!(loads, [5, 7], "expert 6 is in the cache");
        assert!(prefetches.contains(1, 5) && !prefetches.contains(1, 6));
        assert_eq!(prefetches.counts().wasted, 2);
        assert_eq!(prefetches.take(1, 5), Some(()));
        assert_eq!(prefetches.take(1, 5), None);
        let dropped: Vec<Key> = prefetches
            .end_pass(1, &[5, 6])
            .map(|(key, ())| key)
            .collect();
        assert_eq!(dropped, [7]);
        let expected = PrefetchCounts {
            passes: 1,
            predicted: 3,
            correct: 2,
            wasted: 1,
        };
        assert_eq!(prefetches.counts(), expected);
    }
}
