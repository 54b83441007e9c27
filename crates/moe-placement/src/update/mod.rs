//! Exchanges that the hot expert cache makes after a request: in each layer, experts that were selected more often replace
//! cached experts that were selected less often. The number of cached experts of a layer does not change.

mod payback;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use moe_ids::{ExpertId, LayerId};

use crate::learn::LayerSlots;
use crate::plan::Entry;

pub use payback::Payback;

/// The experts in a running hot cache, by layer.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Cache {
    layers: BTreeMap<LayerId, BTreeSet<ExpertId>>,
}

impl Cache {
    /// Cached experts of a layer; `None` if the layer is not in the cache.
    pub fn of_layer(&self, layer: LayerId) -> Option<&BTreeSet<ExpertId>> {
        self.layers.get(&layer)
    }

    /// Number of cached experts.
    pub fn len(&self) -> usize {
        self.layers.values().map(BTreeSet::len).sum()
    }

    /// Whether the cache is empty.
    pub fn is_empty(&self) -> bool {
        self.layers.is_empty()
    }
}

/// Collects `(layer, expert)` pairs.
impl FromIterator<(LayerId, ExpertId)> for Cache {
    fn from_iter<I: IntoIterator<Item = (LayerId, ExpertId)>>(experts: I) -> Cache {
        let mut cache = Cache::default();
        for (layer, expert) in experts {
            cache.layers.entry(layer).or_default().insert(expert);
        }
        cache
    }
}

/// Replacement of one cached expert by another expert of the same layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exchange {
    /// Block number in the model.
    pub layer: LayerId,
    /// Expert to evict.
    pub evict: ExpertId,
    /// Expert to load.
    pub add: ExpertId,
    /// Score of the evicted expert; 0 if it was not selected.
    pub evict_score: u64,
    /// Score of the loaded expert.
    pub add_score: u64,
}

impl Exchange {
    /// Increase in score: `add_score - evict_score`, at least 0.
    pub fn gain(&self) -> u64 {
        self.add_score.saturating_sub(self.evict_score)
    }
}

/// A planned update of a hot cache after a request.
#[derive(Debug, Clone, PartialEq)]
pub struct Update {
    /// Number of expert slots of the request that were served from the cache.
    pub hot_slots: u64,
    /// Number of expert slots of the request that were not served from the cache.
    pub cold_slots: u64,
    /// Number of cached experts in layers that have both cached and selected experts.
    pub hot_experts: usize,
    /// All exchanges that together make the cache the best one for the request, highest gain first. The best cache contains the
    /// selected experts with the highest scores of each layer.
    pub candidates: Vec<Exchange>,
    /// Number of candidates that the update rate allows.
    pub max_exchange: usize,
}

impl Update {
    /// Plans an update.
    ///
    /// - `cache`: the experts that the cache contains now.
    /// - `ranking`: [`rank`](crate::plan::rank) of the observations of the request, from a live report of the fork.
    /// - `slots`: hot and cold slot totals of the report.
    /// - `n_expert`: experts per layer; higher expert ids are ignored.
    /// - `rate`: fraction of the cached experts that may be exchanged, clamped to 0.0..=1.0.
    pub fn new(
        cache: &Cache,
        ranking: &[Entry],
        slots: &[LayerSlots],
        n_expert: u64,
        rate: f64,
    ) -> Update {
        let mut scores: BTreeMap<LayerId, BTreeMap<ExpertId, u64>> = BTreeMap::new();
        for entry in ranking {
            let layer = scores.entry(entry.layer).or_default();
            let score = layer.entry(entry.expert).or_default();
            *score = score.saturating_add(entry.score);
        }
        let mut candidates = Vec::new();
        let mut hot_experts = 0;
        for (&layer, cached) in &cache.layers {
            if let Some(scores) = scores.get(&layer) {
                hot_experts += cached.len();
                candidates.extend(exchanges(layer, cached, scores, n_expert));
            }
        }
        candidates.sort_by_key(|exchange| (Reverse(exchange.gain()), exchange.layer, exchange.add));
        let sum = |slots: u64, more: u64| slots.saturating_add(more);
        Update {
            hot_slots: slots.iter().map(|layer| layer.hot).fold(0, sum),
            cold_slots: slots.iter().map(|layer| layer.cold).fold(0, sum),
            hot_experts,
            max_exchange: max_exchange(rate, hot_experts, candidates.len()),
            candidates,
        }
    }

    /// Exchanges within the update rate, highest gain first.
    pub fn exchanges(&self) -> &[Exchange] {
        &self.candidates[..self.max_exchange.min(self.candidates.len())]
    }

    /// Fraction of the slots served from the cache; 0 if there are no slots.
    pub fn hit_rate(&self) -> f64 {
        let slots = self.hot_slots.saturating_add(self.cold_slots);
        if slots > 0 {
            self.hot_slots as f64 / slots as f64
        } else {
            0.0
        }
    }
}

/// Number of exchanges that `rate` allows: `ceil(rate × hot_experts)`, at most `n_candidates`. `rate` is clamped to
/// 0.0..=1.0.
#[expect(clippy::cast_possible_truncation, reason = "at most `hot_experts`")]
pub fn max_exchange(rate: f64, hot_experts: usize, n_candidates: usize) -> usize {
    let limit = (rate.clamp(0.0, 1.0) * hot_experts as f64).ceil();
    n_candidates.min(limit as usize)
}

/// Compares the cached experts of a layer with the same number of experts with the highest scores. Desired experts that are
/// not cached, highest score first, replace cached experts that are not desired, lowest score first.
fn exchanges(
    layer: LayerId,
    cached: &BTreeSet<ExpertId>,
    scores: &BTreeMap<ExpertId, u64>,
    n_expert: u64,
) -> Vec<Exchange> {
    let mut desired: Vec<(ExpertId, u64)> = scores
        .iter()
        .map(|(&expert, &score)| (expert, score))
        .filter(|&(expert, score)| u64::from(expert.0) < n_expert && score > 0)
        .collect();
    desired.sort_by_key(|&(expert, score)| (Reverse(score), expert));
    desired.truncate(cached.len());

    let is_desired = |expert: ExpertId| desired.iter().any(|&(wanted, _)| wanted == expert);
    let mut evicted: Vec<(u64, ExpertId)> = cached
        .iter()
        .filter(|&&expert| !is_desired(expert))
        .map(|expert| (scores.get(expert).copied().unwrap_or(0), *expert))
        .collect();
    evicted.sort_unstable();
    let added = desired
        .iter()
        .filter(|(expert, _)| !cached.contains(expert));
    added
        .zip(evicted)
        .map(|(&(add, add_score), (evict_score, evict))| Exchange {
            layer,
            evict,
            add,
            evict_score,
            add_score,
        })
        .collect()
}
