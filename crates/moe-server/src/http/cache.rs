//! `/moe-layer-perf` and `/moe-hot-cache`: counters and updates of the expert cache, as in the fork
//! [adrianhoehne/llama.cpp](https://github.com/adrianhoehne/llama.cpp).

use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::response::Response;
use moe_placement::learn::LearnFile;
use moe_placement::perf::PerfMode;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::body::JsonBody;
use super::error::{ApiError, json_response, json_text};
use super::integer::{Int, Integer};
use super::{HotCacheError, HotCacheUpdate, Shared};

/// `GET /moe-layer-perf`.
pub(super) async fn report(State(server): State<Shared>) -> Result<Response, ApiError> {
    let report = server.blocking(|backend| backend.perf_report());
    Ok(json_text(report.await?))
}

#[derive(Deserialize)]
struct SetMode {
    mode: Mode,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "expected \"off\", \"update\" or \"full\"")]
enum Mode {
    Name(String),
    Switch(bool),
    Number(Integer),
}

/// `POST /moe-layer-perf`: sets the mode, and returns the counters, which are reset.
pub(super) async fn set_mode(
    State(server): State<Shared>,
    body: JsonBody,
) -> Result<Response, ApiError> {
    let name = match body.read::<SetMode>()?.mode {
        Mode::Name(name) => name,
        Mode::Switch(is_on) => is_on.to_string(),
        Mode::Number(Integer(number)) => number.to_string(),
    };
    let mode: PerfMode = name
        .parse()
        .map_err(|error| ApiError::param("mode", format!("mode: {error}")))?;
    let report = server.blocking(move |backend| {
        backend.set_perf_mode(mode);
        backend.perf_report()
    });
    Ok(json_text(report.await?))
}

#[derive(Deserialize)]
pub(super) struct Parameters {
    json: Option<String>,
}

/// `GET /moe-hot-cache?json=…`: updates the cache from a learn file or, without one, from the current counters.
pub(super) async fn apply_query(
    State(server): State<Shared>,
    parameters: Result<Query<Parameters>, QueryRejection>,
) -> Result<Response, ApiError> {
    let Query(parameters) =
        parameters.map_err(|error| ApiError::invalid(format!("the query is invalid: {error}")))?;
    let text = match parameters.json {
        Some(text) if !text.is_empty() => text,
        _ => {
            let report = server.blocking(|backend| backend.perf_report());
            report.await?
        }
    };
    let root = serde_json::from_str(&text)
        .map_err(|error| ApiError::param("json", format!("json: {error}")))?;
    apply(&server, &JsonBody::new(root)?).await
}

/// `POST /moe-hot-cache`: updates the cache from the learn file in the body.
pub(super) async fn apply_body(
    State(server): State<Shared>,
    body: JsonBody,
) -> Result<Response, ApiError> {
    apply(&server, &body).await
}

/// A learn file, and whether to save it. The types are those of `schemas/openapi.json`: the parser of learn files does not check layers
/// without counts.
#[derive(Deserialize)]
struct Learn {
    save_to_disk: Option<bool>,
    #[serde(rename = "layers")]
    _layers: Vec<Layer>,
}

#[derive(Deserialize)]
#[expect(dead_code, reason = "only the types are checked")]
struct Layer {
    layer: Int<u16>,
    #[serde(default)]
    experts: Vec<(Int<u32>, Int<u64>)>,
    #[serde(default)]
    hot_experts: Vec<(Int<u32>, Int<u64>)>,
    #[serde(default)]
    cold_experts: Vec<(Int<u32>, Int<u64>)>,
    #[serde(default)]
    calls: f64,
    #[serde(default)]
    cold_slots_total: f64,
    #[serde(default)]
    cold_slots_per_call: f64,
    #[serde(default)]
    parallel_join_wait_time_per_call_us: f64,
    #[serde(default)]
    parallel_hot_lane_wall_time_per_call_us: f64,
    #[serde(default)]
    parallel_cold_lane_wall_time_per_call_us: f64,
    #[serde(default)]
    total_moe_time_per_call_us: f64,
}

/// Keys of a layer whose numbers are integers. A learn file must not spell them `1.0`.
const INTEGER_KEYS: [&str; 4] = ["layer", "experts", "hot_experts", "cold_experts"];

/// Spells the integers of a layer without a fraction.
fn spell_integers(value: &mut Value) {
    match value {
        Value::Number(number) if number.is_f64() => {
            let integer = serde_json::from_value::<Int<u64>>(value.clone());
            if let Ok(Int(integer)) = integer {
                *value = integer.into();
            }
        }
        Value::Array(values) => values.iter_mut().for_each(spell_integers),
        _ => {}
    }
}

async fn apply(server: &Shared, body: &JsonBody) -> Result<Response, ApiError> {
    let save_to_disk = body.read::<Learn>()?.save_to_disk == Some(true);
    let mut root: Map<String, Value> = body.read()?;
    root.shift_remove("save_to_disk");
    let layers = root.get_mut("layers").and_then(Value::as_array_mut);
    for layer in layers.into_iter().flatten() {
        for key in INTEGER_KEYS {
            layer.get_mut(key).map(spell_integers);
        }
    }
    let learn = LearnFile::parse(&Value::Object(root).to_string())
        .map_err(|error| ApiError::invalid(format!("the learn file is invalid: {error}")))?;
    let update = server.blocking(move |backend| backend.apply_hot_cache(&learn, save_to_disk));
    let update = update.await?.map_err(|error| match error {
        HotCacheError::Unavailable(_) | HotCacheError::Invalid(_) => {
            ApiError::conflict(error.to_string())
        }
        HotCacheError::NotSaved(_) => ApiError::internal(error.to_string()),
        HotCacheError::Stopped(_) => ApiError::shutting_down(),
    })?;
    let HotCacheUpdate { update, saved } = update;
    let mut answer = json!({
        "success": true,
        "active": true,
        "update_rate": update.update_rate,
        "exchanged": update.exchanged,
        "candidates": update.candidates,
        "max_exchange": update.max_exchange,
        "hot_experts": update.hot_experts,
        "layers_changed": update.layers_changed,
        "saved_to_disk": saved.is_some(),
    });
    if let Some(saved) = saved {
        answer["path"] = saved.path.into();
        answer["backup_path"] = saved.backup_path.into();
    }
    Ok(json_response(&answer))
}
