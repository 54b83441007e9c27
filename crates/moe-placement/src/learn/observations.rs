//! Reading a learn file by the rules of the hot-cache runtime's own parser: what it refuses is refused, what it ignores is
//! ignored, and what it derives is derived.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::{OLD_SCHEMA, SCHEMA};

/// Why a learn file is refused. The runtime refuses the same files.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The text is not JSON.
    #[error("the learn file is not JSON: {0}; write it anew with `hotness --out`")]
    Json(#[from] serde_json::Error),
    /// The root is not an object, or its schema is not one of the two known names.
    #[error("the learn file's `schema` is {found}; it must be \"{SCHEMA}\" or \"{OLD_SCHEMA}\"")]
    Schema {
        /// What stands there instead.
        found: String,
    },
    /// No `layers` array.
    #[error("the learn file has no `layers` array; it must hold one object for each layer")]
    Layers,
    /// A layer without an unsigned id.
    #[error("layers[{index}] of the learn file has no unsigned integer `layer`")]
    LayerId {
        /// Position in `layers`.
        index: usize,
    },
    /// An array of counts that is not made of pairs.
    #[error(
        "`{key}` in layers[{index}] of the learn file must be an array of [expert_id, count] pairs of unsigned integers"
    )]
    Experts {
        /// Position in `layers`.
        index: usize,
        /// Key of the faulty array.
        key: &'static str,
    },
    /// A number of the wrong JSON type.
    #[error("`{key}` in layers[{index}] of the learn file must be a number")]
    Number {
        /// Position in `layers`.
        index: usize,
        /// Key of the faulty value.
        key: &'static str,
    },
}

/// What a learn file says of one layer.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerObservation {
    /// Block number in the model.
    pub layer: u32,
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
    pub expert: u32,
    /// Count where hot and cold were not told apart.
    pub raw: u64,
    /// Count served by the cache.
    pub hot: u64,
    /// Count served by the cold lane.
    pub cold: u64,
}

/// Reads a learn file. Layers come in ascending order; repeated layer objects stay apart, layers with nothing counted are
/// dropped, and an id that does not fit 32 bits is cut to them, as in the runtime.
///
/// # Errors
/// As [`Error`] tells; the whole file is refused at the first fault.
pub fn parse_observations(text: &str) -> Result<Vec<LayerObservation>, Error> {
    let root: Value = serde_json::from_str(text)?;
    let Value::Object(root) = root else {
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
    let Some(Value::Array(layers)) = root.get("layers") else {
        return Err(Error::Layers);
    };
    let mut observations = Vec::new();
    for (index, layer) in layers.iter().enumerate() {
        observations.extend(parse_layer(layer, index)?);
    }
    observations.sort_by_key(|observation| observation.layer);
    Ok(observations)
}

/// Whether a cache can be planned from these observations: the file parsed and counted something.
pub fn is_usable(observations: &[LayerObservation]) -> bool {
    !observations.is_empty()
}

fn parse_layer(layer: &Value, index: usize) -> Result<Option<LayerObservation>, Error> {
    let Value::Object(layer) = layer else {
        return Err(Error::LayerId { index });
    };
    let Some(id) = layer.get("layer").and_then(Value::as_u64) else {
        return Err(Error::LayerId { index });
    };

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
        let (calls, slots) = (
            number("calls")?.trunc(),
            number("cold_slots_total")?.trunc(),
        );
        if calls > 0.0 && slots > 0.0 {
            cold_slots_per_call = slots / calls;
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
        layer: id as u32,
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

/// Adds the pairs of one array to `experts` and tells whether any count was above zero. A missing array adds nothing.
fn add_counts(
    layer: &Map<String, Value>,
    index: usize,
    key: &'static str,
    experts: &mut BTreeMap<u32, ExpertObservation>,
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
        let Some([expert, count]) = pair else {
            return Err(Error::Experts { index, key });
        };
        let (Some(expert), Some(count)) = (expert.as_u64(), count.as_u64()) else {
            return Err(Error::Experts { index, key });
        };
        if count == 0 {
            continue;
        }
        let expert = expert as u32;
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
