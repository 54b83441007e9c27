//! What the hot-cache runtime's own parser takes from a learn file: what it refuses is refused, what it ignores is ignored,
//! and what it derives is derived.

use std::collections::BTreeMap;

use moe_ids::{ExpertId, LayerId};
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Map, Value};

use super::{Error, LearnFile};
use crate::json::{self, JsonError};

/// The arrays of counts in a layer.
pub(super) const COUNT_KEYS: [&str; 3] = ["experts", "hot_experts", "cold_experts"];
/// Those of them that are read first; the other counts where neither of these has a count.
pub(super) const SPLIT_KEYS: [&str; 2] = ["hot_experts", "cold_experts"];

/// What a learn file says of one layer.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerObservation {
    /// Block number in the model.
    pub layer: LayerId,
    /// The counts are split into hot and cold; otherwise they are in `raw`.
    pub has_branch_counts: bool,
    /// Average number of cold expert slots in a pass of the layer.
    pub cold_slots_per_call: f64,
    /// Microseconds a pass waited at the join of the two lanes.
    pub join_wait_us: f64,
    /// Microseconds of the hot lane in a pass.
    pub hot_lane_us: f64,
    /// Microseconds of the cold lane in a pass.
    pub cold_lane_us: f64,
    /// Microseconds of the whole mixture-of-experts part in a pass.
    pub total_moe_us: f64,
    /// Waiting time (join wait, else cold minus hot lane) for each cold slot, microseconds; 0 when unknown.
    pub wait_per_cold_slot_us: f64,
    /// Experts with a count above zero, ids ascending, at least one.
    pub experts: Vec<ExpertObservation>,
}

/// What a learn file says of one expert of one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ExpertObservation {
    /// Expert id within its layer.
    pub expert: ExpertId,
    /// Count where hot and cold were not told apart.
    pub raw: u64,
    /// Count served by the cache.
    pub hot: u64,
    /// Count served by the cold lane.
    pub cold: u64,
}

impl ExpertObservation {
    /// How often the expert was chosen: hot and cold together, or the raw count where they were not told apart (then both
    /// are 0). Saturates.
    pub fn hits(&self) -> u64 {
        self.raw.saturating_add(self.hot).saturating_add(self.cold)
    }
}

/// How many expert slots of a layer were served hot and cold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerSlots {
    /// Block number in the model.
    pub layer: LayerId,
    /// Slots served by the cache.
    pub hot: u64,
    /// Slots served by the cold lane.
    pub cold: u64,
}

/// Reads a learn file, as [`LearnFile::parse`] and [`LearnFile::observations`] do.
///
/// # Errors
/// As [`Error`] tells; the whole file is refused at the first fault.
pub fn parse_observations(text: &str) -> Result<Vec<LayerObservation>, Error> {
    LearnFile::parse(text)?.observations()
}

/// Whether a JSON text is an object with a `schema`, as every learn file is; its other values are passed over.
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

/// Whether a cache can be planned from these observations: the file parsed and counted something.
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

/// The id and the object of an entry of `layers`.
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

/// Adds the pairs of one array to `experts` and tells whether any count was above zero. A missing array adds nothing; the
/// id of a zero count is not looked at.
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

/// A number as the runtime reads an unsigned one: a negative one wraps, a fraction is cut off.
#[expect(clippy::cast_possible_truncation, reason = "as in the runtime")]
pub(super) fn unsigned(value: &Value) -> u64 {
    value
        .as_u64()
        .or_else(|| value.as_i64().map(|value| value as u64))
        .or_else(|| value.as_f64().map(|value| value as u64))
        .unwrap_or(0)
}
