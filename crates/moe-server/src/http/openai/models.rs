//! `GET /v1/models`.

use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::response::Response;
use serde_json::{Value, json};

use crate::http::error::{ApiError, json_response};
use crate::http::{ModelInfo, Shared};

/// `GET /v1/models`: the one model.
pub(in crate::http) async fn list(State(server): State<Shared>) -> Response {
    let model = object(server.backend.model());
    json_response(&json!({"object": "list", "data": [model]}))
}

/// `GET /v1/models/{model}`.
pub(in crate::http) async fn retrieve(
    State(server): State<Shared>,
    name: Result<Path<String>, PathRejection>,
) -> Result<Response, ApiError> {
    let Path(name) =
        name.map_err(|error| ApiError::invalid(format!("the path is invalid: {error}")))?;
    let model = server.backend.model();
    if name == model.name {
        Ok(json_response(&object(model)))
    } else {
        let message = format!("the model is unknown; the server has {}", model.name);
        Err(ApiError::not_found(message))
    }
}

fn object(model: &ModelInfo) -> Value {
    json!({
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "moe-analyze",
        "meta": {"n_ctx": model.n_ctx, "n_vocab": model.n_vocab},
    })
}
