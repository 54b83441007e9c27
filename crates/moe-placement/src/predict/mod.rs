//! Predictors: which experts a layer will choose, told before its router does.
//!
//! They see generated tokens in order, layer after layer, and learn as they go. What a prediction is worth depends on when
//! it comes and on what is there already: replaying tells, accuracy alone does not.

mod given;
mod hottest;
mod pairs;
mod previous;

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

pub use given::Given;

use crate::cache::{Experts, Key};
use hottest::Hottest;
use pairs::{CoActivation, Markov};
use previous::Previous;

/// Names experts before they are chosen. Layers are told by [`Experts::layer_index`].
pub trait Predictor: Send {
    /// A layer routed a prompt's tokens to these experts, one entry a choice.
    fn prompt(&mut self, layer: usize, chosen: &[Key]) {
        let _ = (layer, chosen);
    }

    /// A layer routed a pass of generated tokens to these distinct experts.
    fn observe(&mut self, layer: usize, chosen: &[Key]);

    /// Appends the `n` experts that a layer will most likely choose next, the likeliest first; fewer if no more are known.
    fn predict(&self, layer: usize, n: usize, predicted: &mut Vec<Key>);
}

/// A predictor that needs no more than the trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PredictorName {
    /// What the layer chose for the token before.
    Previous,
    /// What the layer chose most so far, the prompt included.
    Hottest,
    /// What followed so far, in that layer, what an earlier layer just chose.
    Markov,
    /// What the layer chose so far together with what it chose for the token before.
    CoActivation,
}

impl PredictorName {
    /// All of them.
    pub const ALL: [PredictorName; 4] = [
        PredictorName::Previous,
        PredictorName::Hottest,
        PredictorName::Markov,
        PredictorName::CoActivation,
    ];

    /// Makes one that is asked `depth` layers ahead.
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

/// A name of no predictor.
#[derive(Debug, thiserror::Error)]
#[error("{name:?} is no predictor; give previous, hottest, markov or coactivation")]
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

/// The `n` keys with the highest scores above 0, of equal ones the lowest key.
fn best(scores: impl Iterator<Item = (Key, f64)>, n: usize, predicted: &mut Vec<Key>) {
    let mut scores: Vec<(Key, f64)> = scores.filter(|&(_, score)| score > 0.0).collect();
    scores.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    predicted.extend(scores.into_iter().take(n).map(|(key, _)| key));
}
