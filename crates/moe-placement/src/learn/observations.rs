//! Observations in a learn file, with the rules of the fork's parser: it accepts and rejects the same files except those
//! that [`Error`] lists, and derives the same values.

use std::collections::BTreeMap;

use moe_ids::{ExpertId, LayerId};
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Map, Value};

use super::{Error, LearnFile};
use crate::json::{self, JsonError};

/// Arrays of counts in a layer.
pub(super) const COUNT_KEYS: [&str; 3] = ["experts", "hot_experts", "cold_experts"];
/// Arrays that take precedence; `experts` is used only if neither contains a positive count.
pub(super) const SPLIT_KEYS: [&str; 2] = ["hot_experts", "cold_experts"];

/// Observations of one layer.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerObservation {
    /// Block number in the model.
    pub layer: LayerId,
    /// Whether the counts of `experts` are split into `hot` and `cold`; otherwise they are in `raw`.
    pub has_branch_counts: bool,
    /// Average number of cold expert slots per call.
    pub cold_slots_per_call: f64,
    /// Time that the fork waits at the join of the hot and the cold lane, in µs per call.
    pub join_wait_us: f64,
    /// Time of the hot lane, in µs per call.
    pub hot_lane_us: f64,
    /// Time of the cold lane, in µs per call.
    pub cold_lane_us: f64,
    /// Time of the complete MoE block, in µs per call.
    pub total_moe_us: f64,
    /// Wait per cold slot, in µs: `join_wait_us / cold_slots_per_call`. If `join_wait_us` is 0, the numerator is
    /// `cold_lane_us - hot_lane_us`. 0 if unknown.
    pub wait_per_cold_slot_us: f64,
    /// Experts with a positive count, sorted by id. Never empty.
    pub experts: Vec<ExpertObservation>,
}

/// Counts of one expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ExpertObservation {
    /// Expert id within its layer.
    pub expert: ExpertId,
    /// Number of selections, if it is not split into hot and cold.
    pub raw: u64,
    /// Number of selections that the hot lane computed (cache hits).
    pub hot: u64,
    /// Number of selections that the cold lane computed (cache misses).
    pub cold: u64,
}

impl ExpertObservation {
    /// Number of selections: `raw + hot + cold`. Either `raw` or both others are 0. Saturates.
    pub fn hits(&self) -> u64 {
        self.raw.saturating_add(self.hot).saturating_add(self.cold)
    }
}

/// Numbers of expert slots of a layer that the hot and the cold lane computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerSlots {
    /// Block number in the model.
    pub layer: LayerId,
    /// Slots that the hot lane computed (cache hits).
    pub hot: u64,
    /// Slots that the cold lane computed (cache misses).
    pub cold: u64,
}

/// Parses a learn file and returns its observations; see [`LearnFile::parse`] and [`LearnFile::observations`].
///
/// # Errors
/// [`Error`] for the first fault.
pub fn parse_observations(text: &str) -> Result<Vec<LayerObservation>, Error> {
    LearnFile::parse(text)?.observations()
}

/// Whether a JSON text is an object with the key `schema`, as every learn file is. Ignores all other values.
///
/// # Errors
/// The text is not a JSON object.
pub fn has_schema(text: &str) -> Result<bool, JsonError> {
    #[derive(Deserialize)]
    #[serde(expecting = "a JSON object")]
    struct Head {
        schema: Option<IgnoredAny>,
    }
    json::parse(text).map(|head: Head| head.schema.is_some())
}

/// Whether a cache can be planned from these observations, that is, whether they contain any counts.
pub fn is_usable(observations: &[LayerObservation]) -> bool {
    !observations.is_empty()
}

pub(super) fn observe(layers: &[Value]) -> Result<Vec<LayerObservation>, Error> {
    let mut observations = Vec::new();
    for (index, layer) in layers.iter().enumerate() {
        observations.extend(observe_layer(layer, index)?);
    }
    observations.sort_by_key(|observation| observation.layer);
    Ok(observations)
}

pub(super) fn layer_slots(layers: &[Value]) -> Vec<LayerSlots> {
    let slots = layers.iter().filter_map(|layer| {
        let slots = |key| layer.get(key).map_or(0, unsigned);
        Some(LayerSlots {
            layer: LayerId::try_from(layer.get("layer")?.as_u64()?).ok()?,
            hot: slots("hot_slots_total"),
            cold: slots("cold_slots_total"),
        })
    });
    slots.collect()
}

/// Layer number and object of an entry of `layers`.
pub(super) fn layer_id(
    layer: &Value,
    index: usize,
) -> Result<(LayerId, &Map<String, Value>), Error> {
    let object = layer.as_object().ok_or(Error::LayerId { index })?;
    let id = object.get("layer").and_then(Value::as_u64);
    let id = id.ok_or(Error::LayerId { index })?;
    let key = "layer";
    let number = u32::try_from(id).map_err(|_| Error::WideId { index, key, id })?;
    let layer = LayerId::try_from(number).map_err(|_| Error::NoLayer { index, id })?;
    Ok((layer, object))
}

fn observe_layer(layer: &Value, index: usize) -> Result<Option<LayerObservation>, Error> {
    let (id, layer) = layer_id(layer, index)?;

    let mut experts = BTreeMap::new();
    let hot = add_counts(layer, index, "hot_experts", &mut experts, |e| &mut e.hot)?;
    let cold = add_counts(layer, index, "cold_experts", &mut experts, |e| &mut e.cold)?;
    let has_branch_counts = hot || cold;
    if !has_branch_counts && !add_counts(layer, index, "experts", &mut experts, |e| &mut e.raw)? {
        return Ok(None);
    }

    let number = |key| number(layer, index, key);
    let mut cold_slots_per_call = number("cold_slots_per_call")?;
    if cold_slots_per_call <= 0.0 {
        number("calls")?;
        number("cold_slots_total")?;
        let total = |key| layer.get(key).map_or(0, unsigned);
        let (calls, slots) = (total("calls"), total("cold_slots_total"));
        if calls > 0 && slots > 0 {
            cold_slots_per_call = slots as f64 / calls as f64;
        }
    }
    let join_wait_us = number("parallel_join_wait_time_per_call_us")?;
    let cold_lane_us = number("parallel_cold_lane_wall_time_per_call_us")?;
    let hot_lane_us = number("parallel_hot_lane_wall_time_per_call_us")?;
    let total_moe_us = number("total_moe_time_per_call_us")?;
    let wait = if join_wait_us > 0.0 {
        join_wait_us
    } else {
        (cold_lane_us - hot_lane_us).max(0.0)
    };
    let wait_per_cold_slot_us = if wait > 0.0 && cold_slots_per_call > 0.0 {
        wait / cold_slots_per_call
    } else {
        0.0
    };
    Ok(Some(LayerObservation {
        layer: id,
        has_branch_counts,
        cold_slots_per_call,
        join_wait_us,
        hot_lane_us,
        cold_lane_us,
        total_moe_us,
        wait_per_cold_slot_us,
        experts: experts.into_values().collect(),
    }))
}

/// Adds the pairs of one array to `experts`. Returns whether any count is positive; `false` for a missing array. The id of a
/// zero count is not checked.
fn add_counts(
    layer: &Map<String, Value>,
    index: usize,
    key: &'static str,
    experts: &mut BTreeMap<ExpertId, ExpertObservation>,
    field: impl Fn(&mut ExpertObservation) -> &mut u64,
) -> Result<bool, Error> {
    let pairs = match layer.get(key) {
        None => return Ok(false),
        Some(Value::Array(pairs)) => pairs,
        Some(_) => return Err(Error::Experts { index, key }),
    };
    let mut any = false;
    for pair in pairs {
        let pair = pair.as_array().map(Vec::as_slice);
        let Some([id, count]) = pair else {
            return Err(Error::Experts { index, key });
        };
        let (Some(id), Some(count)) = (id.as_u64(), count.as_u64()) else {
            return Err(Error::Experts { index, key });
        };
        if count == 0 {
            continue;
        }
        let expert = ExpertId::try_from(id).map_err(|_| Error::WideId { index, key, id })?;
        let entry = experts.entry(expert).or_insert(ExpertObservation {
            expert,
            ..Default::default()
        });
        let total = field(entry);
        *total = total.saturating_add(count);
        any = true;
    }
    Ok(any)
}

fn number(layer: &Map<String, Value>, index: usize, key: &'static str) -> Result<f64, Error> {
    match layer.get(key) {
        None => Ok(0.0),
        Some(value) => value.as_f64().ok_or(Error::Number { index, key }),
    }
}

/// A number as the fork reads an unsigned integer: negative integers wrap, fractions are truncated.
#[expect(clippy::cast_possible_truncation, reason = "as in the fork")]
pub(super) fn unsigned(value: &Value) -> u64 {
    value
        .as_u64()
        .or_else(|| value.as_i64().map(|value| value as u64))
        .or_else(|| value.as_f64().map(|value| value as u64))
        .unwrap_or(0)
}
