//! A cache for each layer, of an equal share of the budget.

use std::sync::Arc;

use super::{Access, Changes, Experts, Key, Policy};

/// The caches.
pub struct Layered {
    experts: Arc<Experts>,
    layers: Vec<LayerCache>,
    /// The layer of the running batch.
    current: Option<usize>,
    /// Room to work in.
    changes: Changes,
}

struct LayerCache {
    policy: Box<dyn Policy>,
    /// The key here of the policy's key 0.
    first: Key,
}

impl Layered {
    /// `budget` is that of all layers together; `policy` makes one of the experts of a layer, which have keys of their own,
    /// and a budget.
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
