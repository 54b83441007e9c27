//! One cache per layer, each with an equal share of the budget.

use std::sync::Arc;

use super::{Access, Changes, Experts, Key, Policy};

/// The caches of all layers.
pub struct Layered {
    experts: Arc<Experts>,
    layers: Vec<LayerCache>,
    /// Index of the layer of the current batch.
    current: Option<usize>,
    /// Buffer for the changes of one layer's cache.
    changes: Changes,
}

struct LayerCache {
    policy: Box<dyn Policy>,
    /// Key in the model of the layer's key 0.
    first: Key,
}

impl Layered {
    /// Splits `budget` (bytes) evenly over the layers. `policy` builds the cache of one layer from the layer's experts,
    /// numbered from 0, and its share of the budget.
    pub fn new(
        experts: Arc<Experts>,
        budget: u64,
        policy: impl Fn(Arc<Experts>, u64) -> Box<dyn Policy>,
    ) -> Layered {
        let share = budget / (experts.n_layer().max(1) as u64);
        let layers = experts
            .by_layer()
            .into_iter()
            .map(|(first, experts)| LayerCache {
                policy: policy(Arc::new(experts), share),
                first,
            });
        Layered {
            layers: layers.collect(),
            experts,
            current: None,
            changes: Changes::default(),
        }
    }

    fn layer(&self, key: Key) -> (usize, Key) {
        let index = self.experts.layer_index(key);
        (index, key - self.layers[index].first)
    }
}

impl Policy for Layered {
    fn look_up(&mut self, key: Key) -> Access {
        let (index, key) = self.layer(key);
        self.current = Some(index);
        self.layers[index].policy.look_up(key)
    }

    fn look_up_again(&mut self, key: Key) {
        let (index, key) = self.layer(key);
        self.layers[index].policy.look_up_again(key);
    }

    fn end_batch(&mut self, changes: &mut Changes) {
        if let Some(index) = self.current.take() {
            let LayerCache { policy, first } = &mut self.layers[index];
            self.changes.clear();
            policy.end_batch(&mut self.changes);
            let evicted = self.changes.evicted.iter();
            changes.evicted.extend(evicted.map(|key| key + *first));
        }
    }

    fn holds(&self, key: Key) -> bool {
        let (index, key) = self.layer(key);
        self.layers[index].policy.holds(key)
    }

    fn used_bytes(&self) -> u64 {
        let used = self.layers.iter().map(|layer| layer.policy.used_bytes());
        used.fold(0, u64::saturating_add)
    }
}
