//! Hotness: how often each expert of each layer was chosen, and with what router weight.
//!
//! A token that is routed in a layer is one *row* there and chooses `n_expert_used` experts, so the counts of a layer sum to
//! rows × `n_expert_used`. A pass of a layer over a batch of tokens is one *call*, whatever the batch's size.

mod bytes;
mod counting;
mod matrix;
mod number;
mod origin;
mod phases;
#[cfg(test)]
mod properties;
mod ranked;
mod readers;
mod sink;
mod summary;

use std::path::PathBuf;

use moe_placement::learn::{LayerCounts, LearnFile};
use moe_trace::{Contradiction, Facts, ImpossibleModel, LayerId};

pub use bytes::ExpertBytes;
pub use matrix::{Matrix, MatrixRow, Value};
use number::Number;
use origin::Origin;
pub(crate) use phases::ByPhase;
pub use phases::Phases;
pub use ranked::RankedExpert;
pub use sink::RowCounter;
pub use summary::LayerSummary;

/// Why hotness could not be computed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Nothing was routed.
    #[error(
        "no token was routed to an expert in {place}; record a run with a mixture-of-experts model, or count another phase"
    )]
    Empty {
        /// The file or run.
        place: String,
    },
    /// Prompt and generated tokens are not distinguished.
    #[error(
        "the trace does not distinguish prompt tokens from generated tokens; count the tokens of all phases"
    )]
    NoPhases,
    /// An id that the model cannot have.
    #[error(
        "{what} {id} in {place} is out of range (below {limit}); the file is damaged, or belongs to another model"
    )]
    Id {
        /// `layer`, `expert` or the like.
        what: &'static str,
        /// The id found.
        id: u32,
        /// Ids must be below.
        limit: u32,
        /// File, and record or row.
        place: String,
    },
    /// A model with more layers or experts than any has.
    #[error("{place}: {source}")]
    Impossible {
        /// The file or run.
        place: String,
        /// Which number cannot be.
        source: ImpossibleModel,
    },
    /// Two inputs that are not of one model.
    #[error(
        "the inputs are of different models: {left} against {right} {what}; give runs of one model"
    )]
    Mixed {
        /// What differs.
        what: &'static str,
        /// Value in the inputs before.
        left: u32,
        /// Value in this input.
        right: u32,
    },
    /// Two inputs that say of which models they are.
    #[error("the inputs are of different models: {left} against {right}; give runs of one model")]
    OtherModel {
        /// Name and hash of the model of the inputs before.
        left: String,
        /// Name and hash of the model of this input.
        right: String,
    },
    /// Counts beyond what can be summed.
    #[error("all counts together are more than 64 bits hold; give inputs that are not damaged")]
    TooMany,
    /// A run that was counted already.
    #[error("run {id} is counted already; give each run once, as a run or as tables")]
    SameRun {
        /// Its id.
        id: String,
    },
    /// A table that holds something else.
    #[error(
        "{} is not a table of routing (it is {schema}); give routing.parquet, or the directory that `moe-analyze parquet` wrote",
        path.display()
    )]
    NotRouting {
        /// The file.
        path: PathBuf,
        /// The schema that its metadata names.
        schema: String,
    },
    /// The order of the tokens did not give what was asked for.
    #[error(transparent)]
    Survey(#[from] crate::survey::Error),
    /// A trace or a table could not be read.
    #[error(transparent)]
    Trace(#[from] moe_trace::Error),
    /// A table of a matrix could not be written.
    #[error("writing a matrix: {0}")]
    Parquet(#[from] parquet::errors::ParquetError),
}

/// One expert's share of the work.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct ExpertTally {
    /// Times the expert was chosen.
    pub count: u64,
    /// Sum of the router weights with which it was chosen, of those that are known; see [`Hotness::has_mass`].
    pub mass: f64,
}

/// One layer in one phase.
#[derive(Debug, Clone, PartialEq, Default)]
struct LayerPhase {
    calls: u64,
    /// Calls that a learn file counts although passes are not recorded.
    assumed_calls: u64,
    rows: u64,
    /// `[up to n_expert]`, by expert id
    experts: Vec<ExpertTally>,
}

/// Counts and router mass of every expert in every layer, by phase.
#[derive(Debug, Clone, PartialEq)]
pub struct Hotness {
    n_expert: Number,
    n_expert_used: Number,
    /// Whether every choice came with a router weight.
    has_mass: bool,
    n_repeated: u64,
    /// `[n_layer]`
    layers: Vec<ByPhase<LayerPhase>>,
    /// The runs that were counted.
    origins: Vec<Origin>,
}

impl Hotness {
    /// Experts in a layer: as the model says, else the highest id seen plus one.
    pub fn n_expert(&self) -> u32 {
        self.n_expert.get()
    }

    /// Whether an input or the model says how many experts a layer has. If not, there may be more than [`Hotness::n_expert`].
    pub fn n_expert_is_known(&self) -> bool {
        matches!(self.n_expert, Number::Stated(_))
    }

    /// Experts chosen for a token in a layer; 0 = unknown, in a trace of counts alone.
    pub fn n_expert_used(&self) -> u32 {
        self.n_expert_used.get()
    }

    /// Whether every choice came with its router weight. Traces of several tools have no weights; then no mass is known.
    pub fn has_mass(&self) -> bool {
        self.has_mass
    }

    /// Choices of an expert that their token had chosen before in the layer, which no router does.
    pub fn n_repeated(&self) -> u64 {
        self.n_repeated
    }

    /// Block numbers of the layers that routed something in these phases, ascending.
    pub fn layers(&self, phases: Phases) -> Vec<LayerId> {
        self.layer_ids()
            .filter(|&layer| self.choices(layer, phases) > 0)
            .collect()
    }

    /// Choices of a layer: rows × experts for a token, as far as rows are known.
    pub fn choices(&self, layer: LayerId, phases: Phases) -> u64 {
        let experts = self
            .phases_of(layer, phases)
            .flat_map(|phase| &phase.experts);
        experts.map(|tally| tally.count).sum()
    }

    /// Tokens routed in a layer; 0 where a trace of counts does not contain them.
    pub fn rows(&self, layer: LayerId, phases: Phases) -> u64 {
        let rows = self.phases_of(layer, phases).map(|phase| phase.rows);
        rows.fold(0, u64::saturating_add)
    }

    /// Passes in which a layer routed something; 0 where a trace of another tool does not contain them.
    pub fn calls(&self, layer: LayerId, phases: Phases) -> u64 {
        let calls = self.phases_of(layer, phases).map(|phase| phase.calls);
        calls.fold(0, u64::saturating_add)
    }

    /// Tokens that the counts rest upon: those of the layer that routed most. A last layer may route fewer, as only
    /// positions whose output is wanted go through it.
    pub fn tokens(&self, phases: Phases) -> u64 {
        self.layer_ids()
            .map(|layer| self.rows(layer, phases))
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

    /// Runs that were counted, and how many of them do not name their model: bare traces, and tables that
    /// other programs wrote.
    pub fn n_runs(&self) -> (usize, usize) {
        let unknown = self.origins.iter().filter(|origin| !origin.is_known());
        (self.origins.len(), unknown.count())
    }

    /// Adds another run of the same model. Where one of them does not name its model, the numbers of experts decide.
    ///
    /// # Errors
    /// [`Error::OtherModel`] or [`Error::Mixed`] if the models differ, [`Error::SameRun`] if a run would count twice.
    pub fn merge(&mut self, other: &Hotness) -> Result<(), Error> {
        self.check_beside(other)?;
        self.add_counts(other)?;
        self.origins.extend_from_slice(&other.origins);
        Ok(())
    }

    /// Makes sure that runs may be counted together, as far as they name their models.
    ///
    /// # Errors
    /// [`Error::OtherModel`] if the models differ, [`Error::SameRun`] if a run would count twice.
    pub fn check_beside(&self, other: &Hotness) -> Result<(), Error> {
        let mut pairs = self.origins.iter().flat_map(|origin| {
            let others = other.origins.iter();
            others.map(move |other| origin.check(other))
        });
        pairs.try_for_each(|checked| checked)
    }

    /// Why what was counted cannot be of this model.
    pub fn contradiction(&self, model: &Facts) -> Option<Contradiction> {
        let mut origins = self.origins.iter();
        origins.find_map(|origin| origin.contradiction(model))
    }

    /// Raises the numbers of experts of a layer and of a token to those of other inputs of the same model, where nothing states
    /// them.
    pub fn raise_seen(&mut self, n_expert: u32, n_expert_used: u32) {
        self.n_expert.raise_seen(n_expert);
        self.n_expert_used.raise_seen(n_expert_used);
    }

    /// All choices that were counted.
    fn n_choices(&self) -> u64 {
        let phases = self.layers.iter().flat_map(ByPhase::iter);
        let experts = phases.flat_map(|phase| &phase.experts);
        experts.map(|tally| tally.count).sum()
    }

    /// Adds counts, whichever run they are of.
    fn add_counts(&mut self, other: &Hotness) -> Result<(), Error> {
        let merged = |what, left: Number, right: Number| {
            left.merge(right).ok_or(Error::Mixed {
                what,
                left: left.get(),
                right: right.get(),
            })
        };
        let n_expert = merged("experts in a layer", self.n_expert, other.n_expert)?;
        let n_expert_used = merged(
            "experts for a token",
            self.n_expert_used,
            other.n_expert_used,
        )?;
        if self.n_choices().checked_add(other.n_choices()).is_none() {
            return Err(Error::TooMany);
        }
        self.n_expert = n_expert;
        self.n_expert_used = n_expert_used;
        self.has_mass &= other.has_mass;
        self.n_repeated += other.n_repeated;
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

    /// Makes sure that tokens of these phases were routed.
    ///
    /// # Errors
    /// [`Error::Empty`] if none was, [`Error::NoPhases`] if only counts without phases are known.
    pub fn check_routed(&self, phases: Phases) -> Result<(), Error> {
        if !self.layers(phases).is_empty() {
            return Ok(());
        }
        let layers = self.layers(Phases::All);
        if layers.iter().any(|&layer| self.has_unknown_phase(layer)) {
            return Err(Error::NoPhases);
        }
        Err(Error::Empty {
            place: "this phase".into(),
        })
    }

    /// The learn file of the hot-cache runtime for these phases. Its `n_expert_used` is 1 where the number is not known.
    ///
    /// # Errors
    /// [`Error::Empty`] if nothing was routed in them: the runtime refuses a file without counts.
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
        // Every pass goes through every layer, so the layer with the most calls has their number.
        let passes = counts.iter().map(|layer| layer.calls).max().unwrap_or(0);
        Ok(LearnFile::from_counts(
            self.n_expert(),
            self.n_expert_used().max(1),
            passes,
            counts,
        ))
    }

    /// Whether a part of the inputs does not record passes. [`Hotness::learn_file`] then counts a call for each token, or, where
    /// tokens are not known either, for each selection of an expert.
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

    /// Whether a layer has choices of unknown phase.
    fn has_unknown_phase(&self, layer: LayerId) -> bool {
        let layer = self.layers.get(layer.index());
        layer.is_some_and(|layer| !layer[None].experts.is_empty())
    }

    /// All layers up to the highest that was seen.
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
        self.rows = self.rows.saturating_add(more.rows);
        for (expert, tally) in more.experts.iter().enumerate() {
            let sum = self.expert(expert);
            sum.count += tally.count;
            sum.mass += tally.mass;
        }
    }

    /// Choices of all experts.
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
