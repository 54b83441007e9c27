//! The parameters of a model as a trace, a manifest or a GGUF file states them, and whether they can be of the same model.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Range;

use moe_gguf::experts::{expert_bytes, expert_bytes_by_layer};
use moe_gguf::map::OffsetMap;
use moe_gguf::{Gguf, PerLayer};
use moe_ids::{LayerId, MAX_ID};

use crate::manifest::Model;

/// The parameters of a model, as far as a trace, a manifest or a GGUF file contains them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ModelInfo {
    /// Path or name of the model.
    pub model: Option<String>,
    /// `general.architecture`.
    pub arch: Option<String>,
    /// Number of layers (`block_count` of a GGUF file), including those of the MTP head.
    pub n_layer: Option<u32>,
    /// Blocks of the multi-token prediction (MTP) head (`nextn_predict_layers`), the last of `n_layer`; 0 if the model has none
    /// or the number is unknown.
    pub n_nextn_layer: u32,
    /// Experts in a layer (`expert_count`).
    pub n_expert: Option<u32>,
    /// Selected experts for a token (`expert_used_count`), if it is the same in all blocks with experts.
    pub n_expert_used: Option<u32>,
    /// Selected experts for a token in each block, if blocks differ. Empty if all blocks are equal, or if the numbers are unknown.
    pub n_expert_used_by_block: Vec<u32>,
    /// Blocks with experts, including those of the MTP head; empty if unknown.
    pub moe_layers: BTreeSet<LayerId>,
    /// Size in bytes of one expert (gate, up, down, biases), by layer. Layers with an unknown size are missing.
    pub expert_bytes: BTreeMap<LayerId, u64>,
}

/// Values that no model has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidModel {
    /// A number above [`MAX_ID`].
    #[error("{n} {what} is more than the limit of {MAX_ID}; the file is damaged")]
    TooMany {
        /// `layers`, `experts in a layer` or `experts for a token`.
        what: &'static str,
        /// The number in the file.
        n: u32,
    },
    /// All blocks belong to the MTP head.
    #[error(
        "no hidden layers: {n_layer} blocks (`block_count`), of which {n_nextn} belong to the MTP head (`nextn_predict_layers`); the file is damaged"
    )]
    NoHiddenLayer {
        /// Blocks of the MTP head.
        n_nextn: u32,
        /// All blocks.
        n_layer: u32,
    },
    /// More experts are selected for a token than a layer has.
    #[error(
        "{n_used} experts for a token (`expert_used_count`), but only {n_expert} in a layer (`expert_count`); the file is damaged"
    )]
    TooFewExperts {
        /// Selected experts for a token.
        n_used: u32,
        /// Experts in a layer.
        n_expert: u32,
    },
}

/// Why a GGUF file contains no usable [`ModelInfo`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// A key of the header has the wrong type.
    #[error(transparent)]
    Gguf(#[from] moe_gguf::Error),
    /// Values that no model has.
    #[error("{path}: {source}; convert the model again")]
    Invalid {
        /// The model's file.
        path: String,
        /// The values.
        source: InvalidModel,
    },
}

/// A parameter that differs between a trace and a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelMismatch {
    /// The parameter of the trace with its unit: `48 layers`.
    pub trace: String,
    /// Path or name of the model, if known.
    pub model: Option<String>,
    /// The model's value of this parameter, without its unit: `6`.
    pub model_value: String,
}

impl fmt::Display for ModelMismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "it has {}, but the model", self.trace)?;
        if let Some(model) = &self.model {
            write!(f, " {model}")?;
        }
        write!(f, " has {}", self.model_value)
    }
}

impl ModelInfo {
    /// The parameters of `gguf`, which was opened from `path`. `expert_bytes` omits layers whose experts differ in size.
    /// `n_expert` is the maximum over the layers.
    ///
    /// # Errors
    /// A key of the header has the wrong type, or a value that no model has.
    pub fn from_gguf(path: &str, gguf: &Gguf) -> Result<ModelInfo, ModelError> {
        let metadata = gguf.metadata();
        let arch = metadata.str("general.architecture")?.map(str::to_owned);
        let values = |name: &str| match &arch {
            Some(arch) => metadata.per_layer(&format!("{arch}.{name}")),
            None => Ok(None),
        };
        let key = |name: &str, one: fn(&PerLayer) -> Option<u64>| {
            let number = values(name)?.as_ref().and_then(one);
            // Saturation is harmless: no model has a number above u32::MAX.
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
        let model_info = ModelInfo {
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
        let fault = model_info
            .invalid()
            .or_else(|| model_info.too_few_experts());
        match fault {
            None => Ok(model_info),
            Some(source) => Err(ModelError::Invalid {
                path: path.to_owned(),
                source,
            }),
        }
    }

    /// The parameters in a manifest.
    pub fn from_manifest(model: &Model) -> ModelInfo {
        let text = |text: &String| Some(text.clone()).filter(|text| !text.is_empty());
        let number = |number: u32| Some(number).filter(|&number| number > 0);
        ModelInfo {
            model: text(&model.path),
            arch: text(&model.arch),
            n_layer: number(model.n_layer),
            n_nextn_layer: model.n_nextn_layer,
            n_expert: number(model.n_expert),
            n_expert_used: number(model.n_expert_used),
            ..ModelInfo::default()
        }
    }

    /// Selected experts for a token in this block; `None` if the block has no experts or the number is unknown.
    pub fn n_expert_used_in(&self, block: LayerId) -> Option<u32> {
        let own = self.n_expert_used_by_block.get(block.index()).copied();
        own.or(self.n_expert_used).filter(|&n| n > 0)
    }

    /// The maximum of the selected experts for a token over all blocks; `None` if unknown.
    pub fn max_expert_used(&self) -> Option<u32> {
        let most = self.n_expert_used_by_block.iter().max().copied();
        self.n_expert_used.or(most).filter(|&n| n > 0)
    }

    /// Number of hidden layers: the blocks without those of the MTP head. Servers and training frameworks count layers this way.
    pub fn n_hidden_layer(&self) -> Option<u32> {
        Some(self.n_layer?.saturating_sub(self.n_nextn_layer))
    }

    /// The blocks of the MTP head, which follow the hidden layers. Empty if the model has none; `None` if the number of layers
    /// is unknown.
    pub fn mtp_head(&self) -> Option<Range<u32>> {
        Some(self.n_hidden_layer()?..self.n_layer?)
    }

    /// The number of blocks to compare with a trace of `n_layer` layers, because a trace may count the MTP head or not.
    pub fn blocks_for(&self, n_layer: u32) -> Option<u32> {
        let n_block = self.n_layer?;
        (n_layer == n_block || Some(n_layer) == self.n_hidden_layer()).then_some(n_block)
    }

    /// Why no model can have these parameters: too many layers or experts, or no hidden layer. `None` if they are plausible.
    pub fn invalid(&self) -> Option<InvalidModel> {
        let numbers = [
            ("layers", self.n_layer),
            ("experts in a layer", self.n_expert),
            ("experts for a token", self.max_expert_used()),
        ];
        for (what, n) in numbers {
            if let Some(n) = n.filter(|&n| n > MAX_ID) {
                return Some(InvalidModel::TooMany { what, n });
            }
        }
        let (n_layer, n_nextn) = (self.n_layer?, self.n_nextn_layer);
        (n_nextn >= n_layer).then_some(InvalidModel::NoHiddenLayer { n_nextn, n_layer })
    }

    /// The error if more experts are selected for a token than a layer has.
    fn too_few_experts(&self) -> Option<InvalidModel> {
        let (n_used, n_expert) = (self.max_expert_used()?, self.n_expert?);
        (n_used > n_expert).then_some(InvalidModel::TooFewExperts { n_used, n_expert })
    }

    /// Why a trace with the parameters `found` cannot be of this model: its architecture or its number of layers or experts
    /// differs. Other quantizations of the same model are accepted, and so is a run that selects fewer experts for a token.
    pub fn mismatch(&self, found: &ModelInfo) -> Option<ModelMismatch> {
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
        let (trace, model_value) = number("layers", n_layer, self.n_layer)
            .or_else(|| number("experts in a layer", found.n_expert, self.n_expert))
            .or_else(arch)?;
        Some(ModelMismatch {
            trace,
            model: self.model.clone(),
            model_value,
        })
    }

    /// Sets the unknown parameters to those of `other`.
    pub fn fill_from(&mut self, other: &ModelInfo) {
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
