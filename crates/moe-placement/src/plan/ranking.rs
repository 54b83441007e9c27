//! Ranking of experts: the order in which they are offered to the cache.

use std::cmp::Reverse;

use moe_ids::{ExpertId, LayerId};

use super::extended::Extended;
use super::weighting::{LayerCurve, Weighting, layer_weights};
use crate::learn::{ExpertObservation, LayerObservation};

/// Fraction of its hot hits that is added to an expert's score, so that cached experts tend to stay. Not used by `flat` and
/// `balanced`.
const HOT_BONUS: f64 = 0.05;

/// Score per rank in `flat` and `balanced`. Hits break ties between equal ranks; they are capped below this value.
const RANK_WEIGHT: u64 = 1_000_000;

/// An expert of a ranking, with its score.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// Block number in the model.
    pub layer: LayerId,
    /// Expert id within its layer.
    pub expert: ExpertId,
    /// Number of selections.
    pub hits: u64,
    /// Score of the expert; [`rank`] contains the formulas.
    pub score: u64,
}

/// All observed experts, highest score first; ties are sorted by layer, then by expert.
///
/// - `Flat`, `Balanced`: `score = r × 1,000,000 + min(hits, 999,999)`. r is n for the expert with the most hits of its
///   layer, n - 1 for the next one, and so on. n is the largest number of observed experts of any layer (`Flat`), or that of
///   the layer (`Balanced`).
/// - `Pressure`, `Smooth`, `Time`: `score = round(hits × weight + 0.05 × hot hits)`, at least 1, with the weights of
///   [`layer_weights`].
///
/// A layer that the file contains twice is ranked twice.
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

/// Experts of a layer by hits. The first has rank `n_places`, the next one `n_places` - 1, and so on.
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
