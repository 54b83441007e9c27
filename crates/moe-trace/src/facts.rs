//! What a trace, a manifest or a model's file says about a model, and whether they can be of the same one.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Range;

use moe_gguf::experts::{expert_bytes, expert_bytes_by_layer};
use moe_gguf::map::OffsetMap;
use moe_gguf::{Gguf, PerLayer};
use moe_ids::{LayerId, MAX_ID};

use crate::manifest::Model;

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
    /// Experts that a token is routed to, if that is one number for all blocks with experts.
    pub n_expert_used: Option<u32>,
    /// Experts that a token is routed to in each block, where blocks differ; empty if they do not, or it is not known.
    pub n_expert_used_by_block: Vec<u32>,
    /// Blocks with experts, those of the MTP head included; empty if they are not known.
    pub moe_layers: BTreeSet<LayerId>,
    /// Bytes of one expert (gate, up, down, biases) of a layer. Absent layers are not known.
    pub expert_bytes: BTreeMap<LayerId, u64>,
}

/// Numbers that no model has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ImpossibleModel {
    /// More than [`MAX_ID`] of something.
    #[error("{n} {what} are more than any model has ({MAX_ID}); the file is damaged")]
    TooMany {
        /// `layers`, `experts in a layer` or `experts for a token`.
        what: &'static str,
        /// How many the file says there are.
        n: u32,
    },
    /// There is no block besides those of the MTP head.
    #[error(
        "no layers: {n_layer} blocks (`block_count`), of which {n_nextn} are of the MTP head (`nextn_predict_layers`); the file is damaged"
    )]
    NoHiddenLayer {
        /// Blocks of the MTP head.
        n_nextn: u32,
        /// All blocks.
        n_layer: u32,
    },
    /// A token is routed to more experts than there are.
    #[error(
        "{n_used} experts for a token (`expert_used_count`), but only {n_expert} in a layer (`expert_count`); the file is damaged"
    )]
    TooFewExperts {
        /// Experts for a token.
        n_used: u32,
        /// Experts in a layer.
        n_expert: u32,
    },
}

/// Why a model's file contains no usable [`Facts`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// A key of the header has another type than it should.
    #[error(transparent)]
    Gguf(#[from] moe_gguf::Error),
    /// Numbers that no model has.
    #[error("{path}: {source}; convert the model again")]
    Impossible {
        /// The model's file.
        path: String,
        /// The numbers.
        source: ImpossibleModel,
    },
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
    /// What `gguf`, opened from `path`, says. A layer whose experts differ in size has no size of an expert; of numbers
    /// of experts that differ between layers the largest counts.
    ///
    /// # Errors
    /// A key of the header has another type than it should, or numbers that no model has.
    pub fn of_model(path: &str, gguf: &Gguf) -> Result<Facts, ModelError> {
        let metadata = gguf.metadata();
        let arch = metadata.str("general.architecture")?.map(str::to_owned);
        let values = |name: &str| match &arch {
            Some(arch) => metadata.per_layer(&format!("{arch}.{name}")),
            None => Ok(None),
        };
        let key = |name: &str, one: fn(&PerLayer) -> Option<u64>| {
            let number = values(name)?.as_ref().and_then(one);
            // No model has a number that is cut off here.
            let number = number.map(|n| u32::try_from(n).unwrap_or(u32::MAX));
            Ok::<_, moe_gguf::Error>(number)
        };
        let used = values("expert_used_count")?;
        let n_expert_used = used.as_ref().and_then(PerLayer::uniform_nonzero);
        let n_expert_used_by_block = match used {
            Some(PerLayer::Each(numbers)) if n_expert_used.is_none() => {
                let numbers = numbers.into_iter();
                numbers
                    .map(|n| u32::try_from(n).unwrap_or(u32::MAX))
                    .collect()
            }
            _ => Vec::new(),
        };
        let map = OffsetMap::new(gguf);
        let facts = Facts {
            model: Some(path.to_owned()),
            n_layer: key("block_count", PerLayer::uniform)?,
            n_nextn_layer: key("nextn_predict_layers", PerLayer::uniform)?.unwrap_or(0),
            n_expert: key("expert_count", PerLayer::max)?.filter(|&n| n > 0),
            n_expert_used: n_expert_used.map(|n| u32::try_from(n).unwrap_or(u32::MAX)),
            n_expert_used_by_block,
            moe_layers: expert_bytes(&map)
                .into_keys()
                .map(|(layer, _)| layer)
                .collect(),
            expert_bytes: expert_bytes_by_layer(&map),
            arch,
        };
        let fault = facts.impossible().or_else(|| facts.too_few_experts());
        match fault {
            None => Ok(facts),
            Some(source) => Err(ModelError::Impossible {
                path: path.to_owned(),
                source,
            }),
        }
    }

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

    /// Experts that a token is routed to in this block; `None` if there are none, or it is not known.
    pub fn n_expert_used_in(&self, block: LayerId) -> Option<u32> {
        let own = self.n_expert_used_by_block.get(block.index()).copied();
        own.or(self.n_expert_used).filter(|&n| n > 0)
    }

    /// The most experts that a token is routed to in any block; `None` if it is not known.
    pub fn max_expert_used(&self) -> Option<u32> {
        let most = self.n_expert_used_by_block.iter().max().copied();
        self.n_expert_used.or(most).filter(|&n| n > 0)
    }

    /// Hidden layers, which is what servers and training frameworks call the number of layers: the blocks without those of the
    /// MTP head.
    pub fn n_hidden_layer(&self) -> Option<u32> {
        Some(self.n_layer?.saturating_sub(self.n_nextn_layer))
    }

    /// The blocks of the MTP head, which follow the hidden layers; empty if there are none, `None` if the number of layers is
    /// not known.
    pub fn mtp_head(&self) -> Option<Range<u32>> {
        Some(self.n_hidden_layer()?..self.n_layer?)
    }

    /// The blocks of this model for a trace that counts `n_layer` layers: a trace may count the MTP head's or not.
    pub fn blocks_for(&self, n_layer: u32) -> Option<u32> {
        let n_block = self.n_layer?;
        (n_layer == n_block || Some(n_layer) == self.n_hidden_layer()).then_some(n_block)
    }

    /// Why there is no such model: it would have more layers or experts than any has, or no hidden layer.
    pub fn impossible(&self) -> Option<ImpossibleModel> {
        let numbers = [
            ("layers", self.n_layer),
            ("experts in a layer", self.n_expert),
            ("experts for a token", self.max_expert_used()),
        ];
        for (what, n) in numbers {
            if let Some(n) = n.filter(|&n| n > MAX_ID) {
                return Some(ImpossibleModel::TooMany { what, n });
            }
        }
        let (n_layer, n_nextn) = (self.n_layer?, self.n_nextn_layer);
        (n_nextn >= n_layer).then_some(ImpossibleModel::NoHiddenLayer { n_nextn, n_layer })
    }

    /// Why the header of a model contradicts itself: a token would be routed to more experts than there are.
    fn too_few_experts(&self) -> Option<ImpossibleModel> {
        let (n_used, n_expert) = (self.max_expert_used()?, self.n_expert?);
        (n_used > n_expert).then_some(ImpossibleModel::TooFewExperts { n_used, n_expert })
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
        if self.n_expert_used.is_none() && self.n_expert_used_by_block.is_empty() {
            self.n_expert_used = other.n_expert_used;
            self.n_expert_used_by_block
                .clone_from(&other.n_expert_used_by_block);
        }
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
