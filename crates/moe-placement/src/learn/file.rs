//! Learn files as JSON documents: parsing, building from counts, filtering, writing.

use moe_files::text::strip_byte_order_mark;
use moe_ids::{ExpertId, LayerId};
use serde_json::{Map, Value, json};

use super::observations::{
    COUNT_KEYS, LayerObservation, LayerSlots, SPLIT_KEYS, layer_id, layer_slots, observe,
};
use super::{Error, OLD_SCHEMA, SCHEMA};

/// Counts of one layer, input of [`LearnFile::from_counts`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerCounts {
    /// Block number in the model.
    pub layer: LayerId,
    /// Number of passes in which the layer routed tokens. A batch of any number of tokens is one pass.
    pub calls: u64,
    /// `[n_expert]`: selections of each expert.
    pub experts: Vec<u64>,
}

impl LayerCounts {
    /// Number of tokens that make `selections` selections: `ceil(selections / n_expert_used)`. Returns 0 if `n_expert_used` is 0
    /// (unknown).
    pub fn tokens_of(selections: u64, n_expert_used: u32) -> u64 {
        match n_expert_used {
            0 => 0,
            used => selections.div_ceil(used.into()),
        }
    }

    /// Number of calls of a layer whose passes were not recorded: `tokens`, or `selections` if `tokens` is 0 (unknown). At
    /// least 1, because readers ignore the counts of a layer without calls.
    pub fn calls_without_passes(tokens: u64, selections: u64) -> u64 {
        if tokens > 0 {
            tokens
        } else {
            selections.max(1)
        }
    }
}

/// Numbers of a learn file that its observations do not contain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Totals {
    /// Number of experts per layer (`n_expert`), if the file contains it.
    pub n_expert: Option<u32>,
    /// Number of selected experts per token (`n_expert_used`), if the file contains it.
    pub n_expert_used: Option<u32>,
    /// Block number and `calls`, if the file contains it, of each entry of `layers` in the order of the file.
    pub calls: Vec<(LayerId, Option<u64>)>,
}

/// A learn file. Preserves the order of all keys and keeps unknown keys.
#[derive(Debug, Clone, PartialEq)]
pub struct LearnFile {
    pub(super) root: Map<String, Value>,
}

impl LearnFile {
    /// A learn file with these keys. They must have the types that [`LearnFile::parse`] expects.
    pub(crate) fn from_root(root: Map<String, Value>) -> LearnFile {
        LearnFile { root }
    }

    /// Parses a learn file with the checks of the fork, and rejects repeated keys.
    ///
    /// # Errors
    /// [`Error`] for the first fault. JSON nested more than 128 levels deep is also rejected.
    pub fn parse(text: &str) -> Result<LearnFile, Error> {
        let Value::Object(root) = crate::json::unique_value(strip_byte_order_mark(text))? else {
            return Err(Error::Schema {
                found: "missing (the file is not a JSON object)".into(),
            });
        };
        match root.get("schema") {
            Some(Value::String(schema)) if schema == SCHEMA || schema == OLD_SCHEMA => {}
            Some(other) => {
                return Err(Error::Schema {
                    found: other.to_string(),
                });
            }
            None => {
                return Err(Error::Schema {
                    found: "missing".into(),
                });
            }
        }
        let file = LearnFile { root };
        file.observations()?;
        Ok(file)
    }

    /// Builds the learn file that the fork writes after a learn run: mode `update`, no hot cache (all slots are cold), no
    /// times. `updates` is the number of forward passes.
    ///
    /// Sorts layers by number. Omits layers without selections, like the fork.
    pub fn from_counts(
        n_expert: u32,
        n_expert_used: u32,
        updates: u64,
        layers: impl IntoIterator<Item = LayerCounts>,
    ) -> LearnFile {
        let is_counted = |layer: &LayerCounts| layer.experts.iter().any(|&count| count > 0);
        let mut layers: Vec<LayerCounts> = layers.into_iter().filter(is_counted).collect();
        layers.sort_by_key(|layer| layer.layer);
        let layer_calls = layers.iter().map(|layer| layer.calls);
        let root = json!({
            "enabled": true,
            "mode": "update",
            "schema": SCHEMA,
            "n_expert": n_expert,
            "n_expert_used": n_expert_used,
            "updates": updates,
            "overflow_resets": 0,
            "summary": {
                "layer_calls": layer_calls.fold(0, u64::saturating_add),
                "hot_slot_ratio": 0.0,
            },
            "layers": layers.iter().map(learn_run_layer).collect::<Vec<_>>(),
        });
        match root {
            Value::Object(root) => LearnFile { root },
            _ => unreachable!("an object was made"),
        }
    }

    /// The observations that the fork reads from the file, sorted by layer. Repeated layer objects are separate
    /// observations. Layers without counts are dropped.
    ///
    /// # Errors
    /// Like [`LearnFile::parse`]; never for a file that this crate parsed or built.
    pub fn observations(&self) -> Result<Vec<LayerObservation>, Error> {
        observe(self.layers()?)
    }

    /// Hot and cold slot totals of each layer, from which the fork computes its hit rate. Only the live reports of a server
    /// contain them. `None` if the report says that recording is disabled.
    pub fn layer_slots(&self) -> Option<Vec<LayerSlots>> {
        let enabled = self.root.get("enabled") == Some(&Value::Bool(true));
        enabled.then(|| layer_slots(self.layers().unwrap_or_default()))
    }

    /// Number of experts per layer (`n_expert`), if the file contains it.
    pub fn n_expert(&self) -> Option<u64> {
        self.root.get("n_expert")?.as_u64()
    }

    /// Number of selected experts per token (`n_expert_used`), if the file contains it.
    pub fn n_expert_used(&self) -> Option<u64> {
        self.root.get("n_expert_used")?.as_u64()
    }

    /// The numbers of the file that its observations do not contain. The parser of the fork accepts other values.
    ///
    /// # Errors
    /// [`Error::Unsigned`] if one of them is not an unsigned integer, or if `n_expert` or `n_expert_used` does not fit in 32
    /// bits.
    pub fn totals(&self) -> Result<Totals, Error> {
        let number = |key: &str| -> Result<Option<u32>, Error> {
            let Some(value) = self.root.get(key) else {
                return Ok(None);
            };
            let number = value.as_u64().and_then(|n| u32::try_from(n).ok());
            let error = || Error::Unsigned {
                key: key.to_owned(),
                max: u32::MAX.into(),
            };
            number.map(Some).ok_or_else(error)
        };
        let mut calls = Vec::new();
        for (index, layer) in self.layers()?.iter().enumerate() {
            let (id, layer) = layer_id(layer, index)?;
            let error = || Error::Unsigned {
                key: format!("layers[{index}].calls"),
                max: u64::MAX,
            };
            let of_layer = match layer.get("calls") {
                None | Some(Value::Null) => None,
                Some(value) => Some(value.as_u64().ok_or_else(error)?),
            };
            calls.push((id, of_layer));
        }
        Ok(Totals {
            n_expert: number("n_expert")?,
            n_expert_used: number("n_expert_used")?,
            calls,
        })
    }

    /// A copy that contains only experts for which `keep(layer, expert)` is true. Layers without counted experts are
    /// removed. Times and slot totals stay unchanged, because they belong to the layer and determine its weight.
    pub fn filter(&self, keep: impl Fn(LayerId, ExpertId) -> bool) -> LearnFile {
        let mut filtered = self.clone();
        if let Some(Value::Array(layers)) = filtered.root.get_mut("layers") {
            layers.retain_mut(|layer| filter_layer(layer, &keep));
        }
        filtered
    }

    /// The file as compact JSON.
    pub fn to_json(&self) -> String {
        Value::Object(self.root.clone()).to_string()
    }

    pub(super) fn layers(&self) -> Result<&[Value], Error> {
        match self.root.get("layers") {
            Some(Value::Array(layers)) => Ok(layers),
            _ => Err(Error::Layers),
        }
    }
}

/// A layer of a learn run. Keys and their order are those of the fork.
fn learn_run_layer(counts: &LayerCounts) -> Value {
    let experts: Vec<(ExpertId, u64)> = (0..)
        .map(ExpertId)
        .zip(counts.experts.iter().copied())
        .filter(|&(_, count)| count > 0)
        .collect();
    let slots = experts
        .iter()
        .fold(0u64, |slots, &(_, count)| slots.saturating_add(count));
    let slots_per_call = if counts.calls > 0 {
        slots as f64 / counts.calls as f64
    } else {
        0.0
    };
    json!({
        "layer": counts.layer,
        "calls": counts.calls,
        "hot_slots_total": 0,
        "cold_slots_total": slots,
        "hot_slots_per_call": 0.0,
        "cold_slots_per_call": slots_per_call,
        "hot_slot_ratio": 0.0,
        "experts": experts,
        "hot_experts": [],
        "cold_experts": experts,
    })
}

/// Removes the experts of a layer that are not kept. Returns whether a count remains that readers use: in the hot and cold
/// experts, or in `experts` if both are empty.
fn filter_layer(layer: &mut Value, keep: &impl Fn(LayerId, ExpertId) -> bool) -> bool {
    let id = layer.get("layer").and_then(Value::as_u64);
    let Some(id) = id.and_then(|id| LayerId::try_from(id).ok()) else {
        return false;
    };
    let is_split = SPLIT_KEYS.iter().any(|key| has_counts(layer, key));
    for key in COUNT_KEYS {
        if let Some(Value::Array(pairs)) = layer.get_mut(key) {
            pairs.retain(|pair| {
                let expert = pair.get(0).and_then(Value::as_u64);
                expert.is_some_and(|expert| ExpertId::try_from(expert).is_ok_and(|e| keep(id, e)))
            });
        }
    }
    let read: &[&str] = if is_split { &SPLIT_KEYS } else { &COUNT_KEYS };
    read.iter().any(|key| has_counts(layer, key))
}

/// Whether an array of counts contains a positive count.
fn has_counts(layer: &Value, key: &str) -> bool {
    let pairs = layer.get(key).and_then(Value::as_array);
    let count = |pair: &Value| pair.get(1).and_then(Value::as_u64);
    pairs.is_some_and(|pairs| pairs.iter().any(|pair| count(pair) > Some(0)))
}
