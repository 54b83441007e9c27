//! The scheme of the hot-cache runtime: a cache planned from a learn file, of which a share is exchanged after each request
//! for experts that the request chose more. Which, tell [`plan`](crate::plan) and [`update`](crate::update).
//!
//! The plan charges each layer one empty expert, as the runtime does.

use std::sync::Arc;

use super::room::Room;
use super::{Access, BuildError, Changes, Experts, Key, Policy};
use crate::learn::{LayerCounts, LayerObservation, LearnFile};
use crate::plan::{LayerCurve, Plan, Strategy, Weighting, rank};
use crate::update::{Cache, Update};

/// The cache.
pub struct HotCache {
    room: Room,
    experts: Arc<Experts>,
    planned: Vec<Key>,
    /// Share of the cached experts that may be exchanged.
    update_rate: f64,
    /// `[n_keys]`: how often the request chose each expert.
    counts: Vec<u64>,
    n_expert: u32,
}

impl HotCache {
    /// The cache that the runtime builds from a learn file.
    ///
    /// # Errors
    /// [`BuildError::Plan`] if there is no plan.
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
            room: Room::new(experts.clone(), budget),
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

    /// What the request chose, as the runtime's parser takes it from its report.
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
            self.room.insert(key);
            changes.loaded.push(key);
        }
    }

    fn look_up(&mut self, key: Key) -> Access {
        self.counts[key as usize] += 1;
        if self.room.holds(key) {
            Access::Hit
        } else {
            Access::Passed
        }
    }

    fn look_up_again(&mut self, key: Key) {
        self.counts[key as usize] += 1;
    }

    fn end_batch(&mut self, _changes: &mut Changes) {}

    fn end_request(&mut self, changes: &mut Changes) {
        let held = self.room.held().iter().map(|&key| self.experts.get(key));
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
                self.room.remove(evict);
                self.room.insert(add);
                changes.evicted.push(evict);
                changes.loaded.push(add);
            }
        }
        self.counts.fill(0);
    }

    fn holds(&self, key: Key) -> bool {
        self.room.holds(key)
    }

    fn used_bytes(&self) -> u64 {
        self.room.used()
    }
}
