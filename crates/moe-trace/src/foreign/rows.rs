//! What foreign traces say.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::Path;

use super::MAX_ID;
use super::error::ForeignError;
use crate::manifest::Model;
use crate::record::{PHASE_GENERATE, PHASE_PROMPT, PHASE_UNKNOWN};
use crate::token::TokenKey;

/// Whether a token was read or written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Phase {
    /// A token of the prompt.
    Prompt,
    /// A generated token that was fed back.
    Generate,
}

impl Phase {
    /// The number in records.
    pub fn number(self) -> u8 {
        match self {
            Self::Prompt => PHASE_PROMPT,
            Self::Generate => PHASE_GENERATE,
        }
    }

    /// The phase of a number in records.
    pub fn of(number: u8) -> Option<Self> {
        match number {
            PHASE_PROMPT => Some(Self::Prompt),
            PHASE_GENERATE => Some(Self::Generate),
            _ => None,
        }
    }
}

/// One expert of one token in one layer; rows come in the order of the trace, those of a token in the order of their slots.
///
/// The columns of the table `routing`. What the format does not contain is `None`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RoutingRow {
    /// Position of the token in its sequence.
    pub token_id: u32,
    /// Sequence (request, turn) of the token.
    pub sequence_id: Option<u32>,
    /// Prompt or generated.
    pub phase: Option<Phase>,
    /// Layer.
    pub layer_id: u16,
    /// Rank of the expert in the token's top-k, best 0.
    pub slot: u16,
    /// Expert in the layer.
    pub expert_id: u32,
    /// Router weight as applied.
    pub weight: Option<f32>,
    /// Where it was computed, a number of [`lane`](crate::record::lane).
    pub lane: Option<u8>,
    /// Start of the operation; equal for all tokens of a batch in a layer, never 0.
    pub timestamp_ns: Option<u64>,
}

impl RoutingRow {
    /// Token 0, slot 0, expert 0 of a layer, nothing else known: to be filled in with what a format contains.
    pub fn at_layer(layer_id: u16) -> Self {
        Self {
            token_id: 0,
            sequence_id: None,
            phase: None,
            layer_id,
            slot: 0,
            expert_id: 0,
            weight: None,
            lane: None,
            timestamp_ns: None,
        }
    }

    /// The token in its layer.
    pub fn token(&self) -> TokenKey {
        TokenKey {
            layer_id: self.layer_id.into(),
            sequence_id: self.sequence_id,
            token_id: self.token_id,
            phase: self.phase.map_or(PHASE_UNKNOWN, Phase::number),
            timestamp_ns: self.timestamp_ns.unwrap_or(0),
        }
    }
}

/// How often an expert was chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CountRow {
    /// Layer.
    pub layer_id: u16,
    /// Expert in the layer.
    pub expert_id: u32,
    /// The tokens that were counted; `None` = both phases, or unknown.
    pub phase: Option<Phase>,
    /// Times it was chosen.
    pub count: u64,
    /// Sum of the router weights with which it was chosen.
    pub mass: Option<f64>,
}

/// What a format of counts says of a whole layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerRow {
    /// Layer.
    pub layer_id: u16,
    /// The tokens that were counted; `None` = both phases, or unknown.
    pub phase: Option<Phase>,
    /// Passes in which the layer routed something.
    pub calls: Option<u64>,
    /// Tokens that it routed.
    pub rows: Option<u64>,
}

/// What a trace, or a model's file, says about the model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Facts {
    /// Path or name of the model.
    pub model: Option<String>,
    /// `general.architecture`.
    pub arch: Option<String>,
    /// Number of layers: the blocks of a GGUF file (`block_count`), those of the MTP head included.
    pub n_layer: Option<u32>,
    /// Blocks of the multi-token prediction (MTP) head, the last of `n_layer` (`nextn_predict_layers`); 0 if there are none, or
    /// it is not known.
    pub n_nextn_layer: u32,
    /// Experts in a layer.
    pub n_expert: Option<u32>,
    /// Experts that a token is routed to.
    pub n_expert_used: Option<u32>,
    /// Blocks with experts, those of the MTP head included; empty if they are not known.
    pub moe_layers: BTreeSet<u16>,
    /// Bytes of one expert (gate, up, down, biases) of a layer. Absent layers are not known.
    pub expert_bytes: BTreeMap<u16, u64>,
}

/// A number of a model that is higher than that of any model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{n} {what} are more than any model has ({MAX_ID}); the file is damaged")]
pub struct ImpossibleModel {
    /// `layers`, `experts in a layer` or `experts for a token`.
    pub what: &'static str,
    /// How many the file says there are.
    pub n: u32,
}

/// What a trace says of its model, and the model does not have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Contradiction {
    /// What the trace says: `48 layers`.
    pub trace: String,
    /// Path or name of the model, where it is known.
    pub model: Option<String>,
    /// What it has instead: `6`.
    pub has: String,
}

impl fmt::Display for Contradiction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "it says {}, the model", self.trace)?;
        if let Some(model) = &self.model {
            write!(f, " {model}")?;
        }
        write!(f, " has {}", self.has)
    }
}

impl Facts {
    /// What a manifest says of its model.
    pub fn of_manifest(model: &Model) -> Facts {
        let text = |text: &String| Some(text.clone()).filter(|text| !text.is_empty());
        let number = |number: u32| Some(number).filter(|&number| number > 0);
        Facts {
            model: text(&model.path),
            arch: text(&model.arch),
            n_layer: number(model.n_layer),
            n_nextn_layer: model.n_nextn_layer,
            n_expert: number(model.n_expert),
            n_expert_used: number(model.n_expert_used),
            ..Facts::default()
        }
    }

    /// Hidden layers, which is what servers and training frameworks call the number of layers: the blocks without those of the
    /// MTP head.
    pub fn n_hidden_layer(&self) -> Option<u32> {
        Some(self.n_layer?.saturating_sub(self.n_nextn_layer))
    }

    /// The blocks of this model for a trace that counts `n_layer` layers: a trace may count the MTP head's or not.
    pub(super) fn blocks_for(&self, n_layer: u32) -> Option<u32> {
        let n_block = self.n_layer?;
        (n_layer == n_block || Some(n_layer) == self.n_hidden_layer()).then_some(n_block)
    }

    /// Why there is no such model: it would have more layers or experts than any has.
    pub fn impossible(&self) -> Option<ImpossibleModel> {
        let numbers = [
            ("layers", self.n_layer),
            ("experts in a layer", self.n_expert),
            ("experts for a token", self.n_expert_used),
        ];
        let mut numbers = numbers.into_iter();
        let (what, n) = numbers.find_map(|(what, n)| Some((what, n.filter(|&n| n > MAX_ID)?)))?;
        Some(ImpossibleModel { what, n })
    }

    /// Why a trace that says `found` cannot be of this model: another architecture, other numbers of layers or experts.
    /// Quantizations of one model do not contradict each other, and a run may route a token to fewer experts.
    pub fn contradiction(&self, found: &Facts) -> Option<Contradiction> {
        let number = |what, trace: Option<u32>, model: Option<u32>| {
            Some((format!("{} {what}", trace?), model?.to_string())).filter(|_| trace != model)
        };
        let arch = || {
            let (trace, model) = (found.arch.as_ref()?, self.arch.as_ref()?);
            (trace != model).then(|| (format!("architecture {trace}"), model.clone()))
        };
        let is_of_hidden = found.n_hidden_layer() == self.n_hidden_layer();
        let is_counted = found.n_layer.is_some_and(|n| self.blocks_for(n).is_some());
        let n_layer = found.n_layer.filter(|_| !is_of_hidden && !is_counted);
        let (trace, has) = number("layers", n_layer, self.n_layer)
            .or_else(|| number("experts in a layer", found.n_expert, self.n_expert))
            .or_else(arch)?;
        Some(Contradiction {
            trace,
            model: self.model.clone(),
            has,
        })
    }

    /// Makes sure that the trace at `path`, which says `found`, can be of this model.
    ///
    /// # Errors
    /// [`ForeignError::OtherModel`] if it cannot.
    pub fn check(&self, found: &Facts, path: &Path) -> Result<(), ForeignError> {
        match self.contradiction(found) {
            Some(contradiction) => Err(ForeignError::OtherModel {
                path: path.to_owned(),
                contradiction,
            }),
            None => Ok(()),
        }
    }

    /// Adds what `other` knows beyond this.
    pub fn fill_from(&mut self, other: &Facts) {
        fill(&mut self.model, &other.model);
        fill(&mut self.arch, &other.arch);
        fill(&mut self.n_layer, &other.n_layer);
        if self.n_nextn_layer == 0 && self.n_layer == other.n_layer {
            self.n_nextn_layer = other.n_nextn_layer;
        }
        if self.moe_layers.is_empty() {
            self.moe_layers.clone_from(&other.moe_layers);
        }
        fill(&mut self.n_expert, &other.n_expert);
        fill(&mut self.n_expert_used, &other.n_expert_used);
        for (&layer, &bytes) in &other.expert_bytes {
            self.expert_bytes.entry(layer).or_insert(bytes);
        }
    }
}

fn fill<T: Clone>(to: &mut Option<T>, from: &Option<T>) {
    if to.is_none() {
        to.clone_from(from);
    }
}
