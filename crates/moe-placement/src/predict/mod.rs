//! Predictors: which experts a layer will select, before its router runs.
//!
//! A predictor sees the routing decisions of generated tokens in order, layer by layer, and learns online. Accuracy alone
//! does not show the benefit of a predictor. The benefit also depends on the time left for the transfer and on the cache
//! contents, which a replay takes into account.

mod external;
mod hottest;
mod pairs;
mod prefetches;
mod previous;

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

pub use external::ExternalPredictions;
pub use prefetches::{PrefetchCounts, Prefetches};

use crate::cache::{Experts, Key};
use crate::names::alternatives;
use hottest::Hottest;
use pairs::{CoActivation, Markov};
use previous::Previous;

/// Predicts which experts a layer selects. `layer` is the [`Experts::layer_index`] in all methods.
pub trait Predictor: Send {
    /// Reports that a layer routed a batch of prompt tokens. `selected` has one entry per token and expert. Ignored by default.
    fn observe_prompt(&mut self, layer: usize, selected: &[Key]) {
        let _ = (layer, selected);
    }

    /// Reports that a layer routed a pass of generated tokens. `selected` contains each selected expert once.
    fn observe(&mut self, layer: usize, selected: &[Key]);

    /// Appends to `predicted` up to `n` experts that the layer will probably select next, most likely first.
    fn predict(&self, layer: usize, n: usize, predicted: &mut Vec<Key>);
}

/// A predictor that needs only the trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PredictorName {
    /// The experts that the layer selected for the previous token.
    Previous,
    /// The experts that the layer has selected most often so far, prompt included.
    Hottest,
    /// First-order Markov model across layers: experts that followed the selection of an earlier layer.
    Markov,
    /// Co-activation within a layer: experts that were selected together with those of the previous token.
    CoActivation,
}

impl PredictorName {
    /// All predictors.
    pub const ALL: [PredictorName; 4] = [
        PredictorName::Previous,
        PredictorName::Hottest,
        PredictorName::Markov,
        PredictorName::CoActivation,
    ];

    /// Builds the predictor. `depth` is the number of layers to predict ahead, from 1 to one less
    /// than the number of MoE layers; only [`Markov`](Self::Markov) uses it.
    pub fn predictor(self, experts: &Arc<Experts>, depth: usize) -> Box<dyn Predictor> {
        match self {
            PredictorName::Previous => Box::new(Previous::new(experts.n_layer())),
            PredictorName::Hottest => Box::new(Hottest::new(experts)),
            PredictorName::Markov => Box::new(Markov::new(experts, depth)),
            PredictorName::CoActivation => Box::new(CoActivation::new(experts)),
        }
    }
}

impl fmt::Display for PredictorName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            PredictorName::Previous => "previous",
            PredictorName::Hottest => "hottest",
            PredictorName::Markov => "markov",
            PredictorName::CoActivation => "coactivation",
        })
    }
}

/// The name of a predictor is unknown.
#[derive(Debug, thiserror::Error)]
#[error("unknown predictor {name:?}; use {}", alternatives(&PredictorName::ALL))]
pub struct UnknownPredictor {
    name: String,
}

impl FromStr for PredictorName {
    type Err = UnknownPredictor;

    fn from_str(name: &str) -> Result<PredictorName, UnknownPredictor> {
        let found = PredictorName::ALL
            .into_iter()
            .find(|p| p.to_string() == name);
        found.ok_or_else(|| UnknownPredictor { name: name.into() })
    }
}

/// Appends the `n` keys with the highest positive scores; ties go to the lower key.
fn highest(scores: impl Iterator<Item = (Key, f64)>, n: usize, predicted: &mut Vec<Key>) {
    let mut scores: Vec<(Key, f64)> = scores.filter(|&(_, score)| score > 0.0).collect();
    scores.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    predicted.extend(scores.into_iter().take(n).map(|(key, _)| key));
}
