//! Hotness: how often each expert of each layer is selected, and with which router weight.
//!
//! A *routed token* is a token in one layer. It selects `n_expert_used` experts, so the counts of a layer add up to routed
//! tokens × `n_expert_used`. A *call* is a pass of a layer over a batch of any number of tokens.

mod bytes;
mod counting;
mod matrix;
mod number;
mod origin;
#[cfg(test)]
mod properties;
mod ranked;
mod readers;
mod sink;
mod summary;

use std::path::PathBuf;

use moe_placement::learn::{LayerCounts, LearnFile};
use moe_trace::{InvalidModel, LayerId, ModelInfo, ModelMismatch};

use crate::phases::{ByPhase, Phases};
use crate::tally::ExpertTally;

pub use bytes::ExpertBytes;
pub use matrix::{Matrix, MatrixRow, Value};
use number::Number;
use origin::Origin;
pub use ranked::RankedExpert;
pub use sink::RowCounter;
pub use summary::LayerSummary;

/// Reason why hotness cannot be computed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No token was routed.
    #[error(
        "{location} contains no routed tokens of the selected phases; use a trace of a mixture-of-experts model"
    )]
    Empty {
        /// The file, run or phase.
        location: String,
    },
    /// The input does not distinguish prompt and generated tokens.
    #[error("the trace does not distinguish prompt tokens from generated tokens")]
    NoPhases,
    /// An id is out of range.
    #[error(
        "{what} {id} in {location} is out of range (below {limit}); the file is damaged, or belongs to another model"
    )]
    Id {
        /// Kind of id: `layer`, `expert` or `phase`.
        what: &'static str,
        /// The id.
        id: u32,
        /// Exclusive upper bound.
        limit: u32,
        /// File, and record or row.
        location: String,
    },
    /// The model has more layers or experts than any model.
    #[error("{location}: {source}")]
    InvalidModel {
        /// The file or run.
        location: String,
        /// The number that is too large.
        source: InvalidModel,
    },
    /// The numbers of experts in two inputs differ.
    #[error("the inputs are of different models: {left} and {right} {what}; use runs of one model")]
    Mixed {
        /// The number that differs.
        what: &'static str,
        /// Value in the previous inputs.
        left: u32,
        /// Value in this input.
        right: u32,
    },
    /// Two inputs name different models.
    #[error("the inputs are of different models: {left} and {right}; use runs of one model")]
    OtherModel {
        /// Name and hash of the model of the previous inputs.
        left: String,
        /// Name and hash of the model of this input.
        right: String,
    },
    /// The sum of the counts exceeds 64 bits.
    #[error("the sum of all counts exceeds 64 bits; an input is damaged")]
    TooMany,
    /// The run has already been counted.
    #[error("run {id} was already counted; use each run once, as a run or as tables")]
    SameRun {
        /// Id of the run.
        id: String,
    },
    /// The table does not contain routing.
    #[error(
        "{} is not a table of routing (its schema is {schema}); use routing.parquet, or the directory that contains it",
        path.display()
    )]
    NotRouting {
        /// The file.
        path: PathBuf,
        /// Schema name in the metadata of the file.
        schema: String,
    },
    /// The survey failed.
    #[error(transparent)]
    Survey(#[from] crate::survey::Error),
    /// A trace or a table cannot be read.
    #[error(transparent)]
    Trace(#[from] moe_trace::Error),
    /// A table of a matrix cannot be written.
    #[error("cannot write the matrix: {0}")]
    Parquet(#[from] parquet::errors::ParquetError),
}

/// One layer in one phase.
#[derive(Debug, Clone, PartialEq, Default)]
struct LayerPhase {
    calls: u64,
    /// Calls that a learn file contains although passes were not recorded.
    assumed_calls: u64,
    tokens: u64,
    /// `[up to n_expert]`: selections of each expert.
    experts: Vec<ExpertTally>,
}

/// Counts and router mass of every expert in every layer, by phase.
#[derive(Debug, Clone, PartialEq)]
pub struct Hotness {
    n_expert: Number,
    n_expert_used: Number,
    /// Whether every selection has a router weight.
    has_mass: bool,
    n_repeated: u64,
    n_backward: u64,
    /// `[n_layer]`
    layers: Vec<ByPhase<LayerPhase>>,
    /// The counted runs.
    origins: Vec<Origin>,
}

impl Hotness {
    /// Number of experts per layer: as stated by an input, or the highest expert id plus 1.
    pub fn n_expert(&self) -> u32 {
        self.n_expert.get()
    }

    /// Whether an input states the experts per layer. If not, the model may have more than [`Hotness::n_expert`].
    pub fn n_expert_is_known(&self) -> bool {
        matches!(self.n_expert, Number::Stated(_))
    }

    /// Number of selected experts per token; 0 if unknown, in a trace that contains only counts.
    pub fn n_expert_used(&self) -> u32 {
        self.n_expert_used.get()
    }

    /// Whether every selection has a router weight. If not, the mass of experts is unknown.
    pub fn has_mass(&self) -> bool {
        self.has_mass
    }

    /// Number of selections of an expert that the same token had already selected in the layer. A router never does this, so
    /// the trace is probably damaged if it is not 0.
    pub fn n_repeated(&self) -> u64 {
        self.n_repeated
    }

    /// Number of passes of a layer that start before the preceding pass of the layer in the trace. If it is not 0, rows are not in
    /// the order of time, and a token whose rows are apart is counted more than once.
    pub fn n_backward(&self) -> u64 {
        self.n_backward
    }

    /// Layers with routed tokens in these phases, in ascending order.
    pub fn layers(&self, phases: Phases) -> Vec<LayerId> {
        self.layer_ids()
            .filter(|&layer| self.selections(layer, phases) > 0)
            .collect()
    }

    /// Number of selections in a layer: routed tokens × experts per token.
    pub fn selections(&self, layer: LayerId, phases: Phases) -> u64 {
        let experts = self
            .phases_of(layer, phases)
            .flat_map(|phase| &phase.experts);
        experts.map(|tally| tally.count).sum()
    }

    /// Number of tokens routed in a layer; 0 if a trace of counts does not contain it.
    pub fn routed_tokens(&self, layer: LayerId, phases: Phases) -> u64 {
        let tokens = self.phases_of(layer, phases).map(|phase| phase.tokens);
        tokens.fold(0, u64::saturating_add)
    }

    /// Number of passes of a layer; 0 if a trace of another tool does not contain it.
    pub fn calls(&self, layer: LayerId, phases: Phases) -> u64 {
        let calls = self.phases_of(layer, phases).map(|phase| phase.calls);
        calls.fold(0, u64::saturating_add)
    }

    /// Number of tokens of the layer with the most tokens. A last layer may route fewer tokens, because only positions whose
    /// output is needed pass through it.
    pub fn tokens(&self, phases: Phases) -> u64 {
        self.layer_ids()
            .map(|layer| self.routed_tokens(layer, phases))
            .max()
            .unwrap_or(0)
    }

    /// Count and mass of each expert of a layer (`[n_expert]`).
    pub fn experts(&self, layer: LayerId, phases: Phases) -> Vec<ExpertTally> {
        let mut experts = vec![ExpertTally::default(); self.n_expert() as usize];
        for phase in self.phases_of(layer, phases) {
            for (sum, tally) in experts.iter_mut().zip(&phase.experts) {
                sum.count += tally.count;
                sum.mass += tally.mass;
            }
        }
        experts
    }

    /// Number of counted runs, and how many of them do not name their model: bare traces, and tables of other programs.
    pub fn n_runs(&self) -> (usize, usize) {
        let unknown = self.origins.iter().filter(|origin| !origin.is_known());
        (self.origins.len(), unknown.count())
    }

    /// Adds another run of the same model. If one of them does not name its model, only the numbers of experts are compared.
    ///
    /// # Errors
    /// [`Error::OtherModel`] or [`Error::Mixed`] if the models differ, [`Error::SameRun`] if a run would be counted twice,
    /// [`Error::TooMany`] if the counts exceed 64 bits.
    pub fn merge(&mut self, other: &Hotness) -> Result<(), Error> {
        self.check_mergeable(other)?;
        self.add_counts(other)?;
        self.origins.extend_from_slice(&other.origins);
        Ok(())
    }

    /// Checks whether runs may be counted together, as far as they name their models.
    ///
    /// # Errors
    /// [`Error::OtherModel`] if the models differ, [`Error::SameRun`] if a run would be counted twice.
    pub fn check_mergeable(&self, other: &Hotness) -> Result<(), Error> {
        let mut pairs = self.origins.iter().flat_map(|origin| {
            let others = other.origins.iter();
            others.map(move |other| origin.check(other))
        });
        pairs.try_for_each(|checked| checked)
    }

    /// The reason why the counted runs cannot be of this model, if there is one.
    pub fn mismatch(&self, model: &ModelInfo) -> Option<ModelMismatch> {
        let mut origins = self.origins.iter();
        origins.find_map(|origin| origin.mismatch(model))
    }

    /// Raises the numbers of experts per layer and per token to those of other inputs of the same model, unless an input
    /// states them.
    pub fn raise_inferred(&mut self, n_expert: u32, n_expert_used: u32) {
        self.n_expert.raise_seen(n_expert);
        self.n_expert_used.raise_seen(n_expert_used);
    }

    /// Number of all selections.
    fn n_selections(&self) -> u64 {
        let phases = self.layers.iter().flat_map(ByPhase::iter);
        let experts = phases.flat_map(|phase| &phase.experts);
        experts.map(|tally| tally.count).sum()
    }

    /// Adds counts of any run.
    fn add_counts(&mut self, other: &Hotness) -> Result<(), Error> {
        let merged = |what, left: Number, right: Number| {
            left.merge(right).ok_or(Error::Mixed {
                what,
                left: left.get(),
                right: right.get(),
            })
        };
        let n_expert = merged("experts per layer", self.n_expert, other.n_expert)?;
        let n_expert_used = merged("experts per token", self.n_expert_used, other.n_expert_used)?;
        if self
            .n_selections()
            .checked_add(other.n_selections())
            .is_none()
        {
            return Err(Error::TooMany);
        }
        self.n_expert = n_expert;
        self.n_expert_used = n_expert_used;
        self.has_mass &= other.has_mass;
        self.n_repeated += other.n_repeated;
        self.n_backward += other.n_backward;
        if self.layers.len() < other.layers.len() {
            self.layers.resize(other.layers.len(), Default::default());
        }
        let pairs = self
            .layers
            .iter_mut()
            .flat_map(ByPhase::iter_mut)
            .zip(other.layers.iter().flat_map(ByPhase::iter));
        for (phase, more) in pairs {
            phase.add(more);
        }
        Ok(())
    }

    /// Checks that tokens were routed in these phases.
    ///
    /// # Errors
    /// [`Error::Empty`] if no token was routed, [`Error::NoPhases`] if only counts without phases are known.
    pub fn check_routed(&self, phases: Phases) -> Result<(), Error> {
        if !self.layers(phases).is_empty() {
            return Ok(());
        }
        let layers = self.layers(Phases::All);
        if layers.iter().any(|&layer| self.has_unknown_phase(layer)) {
            return Err(Error::NoPhases);
        }
        Err(Error::Empty {
            location: "this phase".into(),
        })
    }

    /// Learn file for these phases. Its `n_expert_used` is 1 if the number is unknown.
    ///
    /// # Errors
    /// Like [`check_routed`](Self::check_routed). The hot expert cache rejects a file without counts.
    pub fn learn_file(&self, phases: Phases) -> Result<LearnFile, Error> {
        self.check_routed(phases)?;
        let counts: Vec<LayerCounts> = self
            .layers(phases)
            .into_iter()
            .map(|layer| LayerCounts {
                layer,
                calls: self
                    .calls(layer, phases)
                    .saturating_add(self.assumed_calls(layer, phases)),
                experts: self
                    .experts(layer, phases)
                    .iter()
                    .map(|tally| tally.count)
                    .collect(),
            })
            .collect();
        // Every pass visits every layer, so the maximum is the number of passes.
        let passes = counts.iter().map(|layer| layer.calls).max().unwrap_or(0);
        Ok(LearnFile::from_counts(
            self.n_expert(),
            self.n_expert_used().max(1),
            passes,
            counts,
        ))
    }

    /// Whether passes are missing in a part of the inputs. [`Hotness::learn_file`] then counts one call per token, or one
    /// call per selection if tokens are also missing.
    pub fn has_assumed_calls(&self) -> bool {
        let mut phases = self.layers.iter().flat_map(ByPhase::iter);
        phases.any(|phase| phase.assumed_calls > 0)
    }

    fn assumed_calls(&self, layer: LayerId, phases: Phases) -> u64 {
        let calls = self
            .phases_of(layer, phases)
            .map(|phase| phase.assumed_calls);
        calls.fold(0, u64::saturating_add)
    }

    /// Whether a layer has selections of unknown phase.
    fn has_unknown_phase(&self, layer: LayerId) -> bool {
        let layer = self.layers.get(layer.index());
        layer.is_some_and(|layer| !layer[None].experts.is_empty())
    }

    /// All layers up to the highest one.
    fn layer_ids(&self) -> impl Iterator<Item = LayerId> {
        (0..).map(LayerId).take(self.layers.len())
    }

    fn phases_of(&self, layer: LayerId, phases: Phases) -> impl Iterator<Item = &LayerPhase> {
        let layer = self.layers.get(layer.index());
        layer.into_iter().flat_map(move |layer| layer.of(phases))
    }
}

impl LayerPhase {
    fn add(&mut self, more: &LayerPhase) {
        self.calls = self.calls.saturating_add(more.calls);
        self.assumed_calls = self.assumed_calls.saturating_add(more.assumed_calls);
        self.tokens = self.tokens.saturating_add(more.tokens);
        for (expert, tally) in more.experts.iter().enumerate() {
            let sum = self.expert(expert);
            sum.count += tally.count;
            sum.mass += tally.mass;
        }
    }

    /// Number of selections of all experts.
    fn selections(&self) -> u64 {
        let counts = self.experts.iter().map(|tally| tally.count);
        counts.fold(0, u64::saturating_add)
    }

    #[inline]
    fn expert(&mut self, expert: usize) -> &mut ExpertTally {
        if self.experts.len() <= expert {
            self.experts.resize(expert + 1, ExpertTally::default());
        }
        &mut self.experts[expert]
    }
}
