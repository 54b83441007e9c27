//! What the hot-cache runtime would exchange after a request: cached experts that were chosen little for others of their layer
//! that were chosen more, each layer keeping its number.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use moe_ids::{ExpertId, LayerId};

use crate::learn::LayerSlots;
use crate::plan::Entry;

/// The experts that a running cache holds, by layer.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Cache {
    layers: BTreeMap<LayerId, BTreeSet<ExpertId>>,
}

impl Cache {
    /// The experts of a layer; none where it is not in the cache.
    pub fn of_layer(&self, layer: LayerId) -> Option<&BTreeSet<ExpertId>> {
        self.layers.get(&layer)
    }

    /// Number of experts.
    pub fn len(&self) -> usize {
        self.layers.values().map(BTreeSet::len).sum()
    }

    /// Whether nothing is cached.
    pub fn is_empty(&self) -> bool {
        self.layers.is_empty()
    }
}

/// From `(layer, expert)`.
impl FromIterator<(LayerId, ExpertId)> for Cache {
    fn from_iter<I: IntoIterator<Item = (LayerId, ExpertId)>>(experts: I) -> Cache {
        let mut cache = Cache::default();
        for (layer, expert) in experts {
            cache.layers.entry(layer).or_default().insert(expert);
        }
        cache
    }
}

/// One expert for another in a layer of the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exchange {
    /// Block number in the model.
    pub layer: LayerId,
    /// The expert that goes.
    pub evict: ExpertId,
    /// The expert that comes.
    pub add: ExpertId,
    /// Score of the one that goes, 0 if it was not chosen.
    pub evict_score: u64,
    /// Score of the one that comes.
    pub add_score: u64,
}

impl Exchange {
    /// What the exchange is worth, at least 0.
    pub fn gain(&self) -> u64 {
        self.add_score.saturating_sub(self.evict_score)
    }
}

/// What an update would do.
#[derive(Debug, Clone, PartialEq)]
pub struct Update {
    /// Expert slots that the cache served.
    pub hot_slots: u64,
    /// Expert slots that it did not serve.
    pub cold_slots: u64,
    /// Cached experts in the layers that take part: those with a cache in which something was chosen.
    pub hot_experts: usize,
    /// All exchanges that would bring the cache to what the report asks for, best first.
    pub candidates: Vec<Exchange>,
    /// How many of them the rate lets through.
    pub max_exchange: usize,
}

impl Update {
    /// Plans an update. `ranking` are the scored observations of the live report, `slots` its totals; experts from
    /// `n_expert` on are none of the model's. `rate` is the share of the cached experts that may be exchanged; beyond 0 to 1
    /// it is clamped.
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

    /// The exchanges that are made, best first.
    pub fn exchanges(&self) -> &[Exchange] {
        &self.candidates[..self.max_exchange.min(self.candidates.len())]
    }

    /// Share of the slots that the cache served; 0 where there were none.
    pub fn hit_rate(&self) -> f64 {
        let slots = self.hot_slots.saturating_add(self.cold_slots);
        if slots > 0 {
            self.hot_slots as f64 / slots as f64
        } else {
            0.0
        }
    }
}

/// How many of `n_candidates` exchanges a rate lets through where `hot_experts` are cached: that share of them, rounded up.
#[expect(clippy::cast_possible_truncation, reason = "at most `hot_experts`")]
pub fn max_exchange(rate: f64, hot_experts: usize, n_candidates: usize) -> usize {
    let most = (rate.clamp(0.0, 1.0) * hot_experts as f64).ceil();
    n_candidates.min(most as usize)
}

/// The layer's cached experts against as many with the highest scores: who is missing, the best first, takes the place of
/// who is not among them, the worst first.
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
