//! The order in which experts are offered to the cache.

use std::cmp::Reverse;

use moe_ids::{ExpertId, LayerId};

use super::extended::Extended;
use super::weighting::{LayerCurve, Weighting, layer_weights};
use crate::learn::{ExpertObservation, LayerObservation};

/// Share of its hot hits that an expert gets on top of its score, so that what is cached stays cached. Not in `flat` and
/// `balanced`.
const HOT_BONUS: f64 = 0.05;

/// What a place in a layer is worth in `flat` and `balanced`; hits below it decide among equal places.
const RANK_WEIGHT: u64 = 1_000_000;

/// An expert with its score.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// Block number in the model.
    pub layer: LayerId,
    /// Expert id within its layer.
    pub expert: ExpertId,
    /// How often it was chosen.
    pub hits: u64,
    /// What the weighting makes of that.
    pub score: u64,
}

/// All observed experts, the best score first; equal scores by layer, then by expert. A layer that the file has twice is
/// ranked twice.
pub fn rank(
    observations: &[LayerObservation],
    weighting: Weighting,
    curve: LayerCurve,
) -> Vec<Entry> {
    let n_places = |layer: &LayerObservation| layer.experts.len() as u64;
    let most_places = observations.iter().map(n_places).max().unwrap_or(0);
    let weights = layer_weights(observations, weighting, curve);
    let mut entries: Vec<Entry> = Vec::new();
    for (layer, weight) in observations.iter().zip(weights) {
        match weighting {
            Weighting::Flat => entries.extend(by_place(layer, most_places)),
            Weighting::Balanced => entries.extend(by_place(layer, n_places(layer))),
            Weighting::Pressure | Weighting::Smooth | Weighting::Time => {
                entries.extend(layer.experts.iter().map(|expert| Entry {
                    layer: layer.layer,
                    expert: expert.expert,
                    hits: expert.hits(),
                    score: weighted(expert, weight),
                }))
            }
        }
    }
    entries.retain(|entry| entry.score > 0);
    entries.sort_by_key(|entry| (Reverse(entry.score), entry.layer, entry.expert));
    entries
}

fn weighted(expert: &ExpertObservation, weight: f64) -> u64 {
    Extended::product(expert.hits(), weight)
        .plus(Extended::product(expert.hot, HOT_BONUS))
        .to_score()
}

/// The experts of a layer by hits; the first is worth `n_places`, the next one place less.
fn by_place(layer: &LayerObservation, n_places: u64) -> impl Iterator<Item = Entry> {
    let mut experts: Vec<(ExpertId, u64)> = layer
        .experts
        .iter()
        .map(|expert| (expert.expert, expert.hits()))
        .collect();
    experts.sort_by_key(|&(expert, hits)| (Reverse(hits), expert));
    let layer = layer.layer;
    let places = (0..=n_places).rev();
    experts
        .into_iter()
        .zip(places)
        .map(move |((expert, hits), place)| Entry {
            layer,
            expert,
            hits,
            score: place
                .saturating_mul(RANK_WEIGHT)
                .saturating_add(hits.min(RANK_WEIGHT - 1)),
        })
}
