//! The hot expert cache of [adrianhoehne/llama.cpp](https://github.com/adrianhoehne/llama.cpp): planned from a learn file,
//! then partly exchanged after each request for experts that the request selected more often.
//!
//! [`plan`](crate::plan) and [`update`](crate::update) contain the rules. Like the fork, the plan charges one empty
//! expert to each layer.

use std::sync::Arc;

use super::contents::Contents;
use super::{Access, BuildError, Changes, Experts, Key, Policy};
use crate::learn::{LayerCounts, LayerObservation, LearnFile};
use crate::plan::{LayerCurve, Plan, Strategy, Weighting, rank};
use crate::update::{Cache, Update};

/// The hot expert cache.
pub struct HotCache {
    contents: Contents,
    experts: Arc<Experts>,
    planned: Vec<Key>,
    /// Fraction of the cached experts that may be exchanged after a request.
    update_rate: f64,
    /// `[n_keys]`: selections of each expert in the current request.
    counts: Vec<u64>,
    n_expert: u32,
}

impl HotCache {
    /// The cache that the fork builds from a learn file, for a budget in bytes.
    ///
    /// # Errors
    /// [`BuildError::Plan`] if the cache cannot be planned.
    pub fn new(
        experts: Arc<Experts>,
        budget: u64,
        learn: &[LayerObservation],
        update_rate: f64,
    ) -> Result<HotCache, BuildError> {
        let ranking = rank(learn, Weighting::Flat, LayerCurve::DEFAULT);
        let sizes = experts.sizes();
        let plan = Plan::new(&ranking, &sizes, &[budget], Strategy::Warm, None)?;
        let selected = plan.lanes.iter().flat_map(|lane| &lane.selected);
        let planned = selected.filter_map(|s| experts.key(s.entry.layer, s.entry.expert));
        Ok(HotCache {
            planned: planned.collect(),
            contents: Contents::new(experts.clone(), budget),
            update_rate,
            counts: vec![0; experts.len()],
            n_expert: sizes
                .iter()
                .map(|(_, expert, _)| expert.0 + 1)
                .max()
                .unwrap_or(0),
            experts,
        })
    }

    /// Selections of the current request, in the format in which the fork's parser reads its own report.
    fn observations(&self) -> Vec<LayerObservation> {
        let mut layers: Vec<LayerCounts> = Vec::new();
        for (key, &count) in (0..).zip(&self.counts) {
            let (layer, expert) = self.experts.get(key);
            if layers.last().is_none_or(|last| last.layer != layer) {
                layers.push(LayerCounts {
                    layer,
                    calls: 1,
                    experts: Vec::new(),
                });
            }
            if let Some(last) = layers.last_mut() {
                last.experts.resize(expert.index(), 0);
                last.experts.push(count);
            }
        }
        let file = LearnFile::from_counts(self.n_expert, 0, 1, layers);
        file.observations().unwrap_or_default()
    }
}

impl Policy for HotCache {
    fn start(&mut self, changes: &mut Changes) {
        for key in self.planned.drain(..) {
            self.contents.insert(key);
            changes.loaded.push(key);
        }
    }

    fn look_up(&mut self, key: Key) -> Access {
        self.counts[key as usize] += 1;
        if self.contents.holds(key) {
            Access::Hit
        } else {
            Access::Bypassed
        }
    }

    fn look_up_again(&mut self, key: Key) {
        self.counts[key as usize] += 1;
    }

    fn end_batch(&mut self, _changes: &mut Changes) {}

    fn end_request(&mut self, changes: &mut Changes) {
        let held = self
            .contents
            .held()
            .iter()
            .map(|&key| self.experts.get(key));
        let cache: Cache = held.collect();
        let ranking = rank(&self.observations(), Weighting::Flat, LayerCurve::DEFAULT);
        let update = Update::new(
            &cache,
            &ranking,
            &[],
            self.n_expert.into(),
            self.update_rate,
        );
        for exchange in update.exchanges() {
            let key = |expert| self.experts.key(exchange.layer, expert);
            if let (Some(evict), Some(add)) = (key(exchange.evict), key(exchange.add)) {
                self.contents.remove(evict);
                self.contents.insert(add);
                changes.evicted.push(evict);
                changes.loaded.push(add);
            }
        }
        self.counts.fill(0);
    }

    fn holds(&self, key: Key) -> bool {
        self.contents.holds(key)
    }

    fn used_bytes(&self) -> u64 {
        self.contents.used()
    }
}
