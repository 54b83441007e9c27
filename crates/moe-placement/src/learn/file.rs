//! A learn file as a document: read, made from counts, cut, written.

use moe_files::text::strip_byte_order_mark;
use moe_ids::{ExpertId, LayerId};
use serde_json::{Map, Value, json};

use super::observations::{
    COUNT_KEYS, LayerObservation, LayerSlots, SPLIT_KEYS, layer_slots, observe,
};
use super::{Error, OLD_SCHEMA, SCHEMA};

/// What one layer did, as input to [`LearnFile::from_counts`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerCounts {
    /// Block number in the model.
    pub layer: LayerId,
    /// Passes in which the layer routed something: one for a batch, whatever its number of tokens.
    pub calls: u64,
    /// Times each expert was chosen, by expert id (`[n_expert]`).
    pub experts: Vec<u64>,
}

impl LayerCounts {
    /// The tokens behind `selections` of experts, of which each token makes `n_expert_used`; 0 if that is 0, which is unknown. A
    /// token of which a part was counted is one.
    pub fn tokens_of(selections: u64, n_expert_used: u32) -> u64 {
        match n_expert_used {
            0 => 0,
            used => selections.div_ceil(used.into()),
        }
    }

    /// The calls of a layer of which only `tokens` (0 = not known) and `selections` of experts were recorded: a pass for each
    /// token, or, where tokens are not known, for each selection. At least 1, as a layer without calls has no counts.
    pub fn calls_without_passes(tokens: u64, selections: u64) -> u64 {
        if tokens > 0 {
            tokens
        } else {
            selections.max(1)
        }
    }
}

/// A learn file with all its keys in their order, the unknown ones too.
#[derive(Debug, Clone, PartialEq)]
pub struct LearnFile {
    pub(super) root: Map<String, Value>,
}

impl LearnFile {
    /// Reads a file and checks it as the runtime does.
    ///
    /// # Errors
    /// [`Error`]; the whole file is refused at the first fault. JSON nested more than 128 deep is refused too.
    pub fn parse(text: &str) -> Result<LearnFile, Error> {
        let Value::Object(root) = crate::json::parse(strip_byte_order_mark(text))? else {
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

    /// Makes the file that the runtime writes after a learn run: mode `update`, no hot cache, hence every slot cold, and no
    /// timings. `updates` is the number of passes through the model.
    ///
    /// Layers are put in ascending order; a layer in which nothing was counted is left out, as the runtime does.
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
            "layers": layers.iter().map(learnt_layer).collect::<Vec<_>>(),
        });
        match root {
            Value::Object(root) => LearnFile { root },
            _ => unreachable!("an object was made"),
        }
    }

    /// What the runtime takes from the file: layers ascending, repeated layer objects apart, layers with nothing counted
    /// dropped.
    ///
    /// # Errors
    /// As [`LearnFile::parse`]; none for a file that was parsed or made here.
    pub fn observations(&self) -> Result<Vec<LayerObservation>, Error> {
        observe(self.layers()?)
    }

    /// The slot totals of a live report, from which the runtime computes its hit rate; nothing if the report says that recording
    /// is off.
    pub fn layer_slots(&self) -> Option<Vec<LayerSlots>> {
        let enabled = self.root.get("enabled") == Some(&Value::Bool(true));
        enabled.then(|| layer_slots(self.layers().unwrap_or_default()))
    }

    /// Experts in a layer of the model, if the file contains it.
    pub fn n_expert(&self) -> Option<u64> {
        self.root.get("n_expert")?.as_u64()
    }

    /// Experts of a token, if the file contains it.
    pub fn n_expert_used(&self) -> Option<u64> {
        self.root.get("n_expert_used")?.as_u64()
    }

    /// The file with only the experts of `keep(layer, expert)`; a layer without any is left out. Times and slot totals stay
    /// what they were: they are the layer's, and its weight comes from them.
    pub fn cut(&self, keep: impl Fn(LayerId, ExpertId) -> bool) -> LearnFile {
        let mut cut = self.clone();
        if let Some(Value::Array(layers)) = cut.root.get_mut("layers") {
            layers.retain_mut(|layer| cut_layer(layer, &keep));
        }
        cut
    }

    /// The file's text: compact JSON, no white space.
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

/// A layer of a learn run, with the keys of the runtime's serializer in its order.
fn learnt_layer(counts: &LayerCounts) -> Value {
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

/// Drops the experts of a layer that are not kept; returns whether a count is left of those that are read: of hot and cold
/// experts, and of `experts` where neither has any.
fn cut_layer(layer: &mut Value, keep: &impl Fn(LayerId, ExpertId) -> bool) -> bool {
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

/// Whether an array of a layer has a count above zero.
fn has_counts(layer: &Value, key: &str) -> bool {
    let pairs = layer.get(key).and_then(Value::as_array);
    let count = |pair: &Value| pair.get(1).and_then(Value::as_u64);
    pairs.is_some_and(|pairs| pairs.iter().any(|pair| count(pair) > Some(0)))
}
