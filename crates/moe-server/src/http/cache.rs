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
use super::{HotCacheError, Shared};

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
    Number(u8),
}

/// `POST /moe-layer-perf`: sets the mode, and returns the counters, which are reset.
pub(super) async fn set_mode(
    State(server): State<Shared>,
    body: JsonBody,
) -> Result<Response, ApiError> {
    let name = match body.parse::<SetMode>()?.mode {
        Mode::Name(name) => name,
        Mode::Switch(is_on) => is_on.to_string(),
        Mode::Number(number) => number.to_string(),
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
    apply(&server, root).await
}

/// `POST /moe-hot-cache`: updates the cache from the learn file in the body.
pub(super) async fn apply_body(
    State(server): State<Shared>,
    body: JsonBody,
) -> Result<Response, ApiError> {
    let root = body.parse()?;
    apply(&server, root).await
}

async fn apply(server: &Shared, mut root: Map<String, Value>) -> Result<Response, ApiError> {
    let save_to_disk = match root.shift_remove("save_to_disk") {
        None | Some(Value::Null) => false,
        Some(Value::Bool(save)) => save,
        Some(_) => {
            let message = "save_to_disk: expected true or false";
            return Err(ApiError::param("save_to_disk", message));
        }
    };
    let learn = LearnFile::parse(&Value::Object(root).to_string())
        .map_err(|error| ApiError::invalid(format!("the learn file is invalid: {error}")))?;
    let update = server.blocking(move |backend| backend.apply_hot_cache(&learn, save_to_disk));
    let update = update.await?.map_err(|error| match error {
        HotCacheError::Invalid(_) => ApiError::invalid(error.to_string()),
        HotCacheError::NotSaved(_) => ApiError::internal(error.to_string()),
    })?;
    let mut answer = json!({
        "success": true,
        "active": true,
        "update_rate": update.update_rate,
        "exchanged": update.exchanged,
        "candidates": update.candidates,
        "max_exchange": update.max_exchange,
        "hot_experts": update.hot_experts,
        "layers_changed": update.layers_changed,
        "saved_to_disk": update.saved.is_some(),
    });
    if let Some(saved) = update.saved {
        answer["path"] = saved.path.into();
        answer["backup_path"] = saved.backup_path.into();
    }
    Ok(json_response(&answer))
}
