//! Bodies of requests.

use axum::body::Body;
use axum::extract::{FromRequest, Request};
use futures_util::StreamExt;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::Shared;
use super::error::ApiError;

/// The body of a request, parsed as JSON, whatever its `Content-Type` is.
pub(super) struct JsonBody(Value);

impl FromRequest<Shared> for JsonBody {
    type Rejection = ApiError;

    async fn from_request(request: Request, server: &Shared) -> Result<JsonBody, ApiError> {
        let options = &server.options;
        let body = read(request.into_body(), options.max_body_bytes);
        let bytes = tokio::time::timeout(options.read_timeout, body)
            .await
            .map_err(|_| ApiError::timeout("the body was not received within the time limit"))??;
        let body = serde_json::from_slice(&bytes)
            .map_err(|error| ApiError::invalid(format!("the body is invalid: {error}")))?;
        JsonBody::new(body)
    }
}

impl JsonBody {
    /// A body from another part of a request.
    ///
    /// # Errors
    /// `body` is not an object. Without this check, a list would be read as the values of the keys.
    pub(super) fn new(body: Value) -> Result<JsonBody, ApiError> {
        if !body.is_object() {
            return Err(ApiError::invalid("the body is not a JSON object"));
        }
        Ok(JsonBody(body))
    }

    /// The value of a key; `None` if it is missing or null.
    pub(super) fn get(&self, key: &str) -> Option<&Value> {
        self.0.get(key).filter(|value| !value.is_null())
    }

    /// The keys of the body that `T` has. Other keys are ignored, so that a body can be read as several types.
    ///
    /// # Errors
    /// A key is missing, or a value has a wrong type.
    pub(super) fn read<T: DeserializeOwned>(&self) -> Result<T, ApiError> {
        serde_path_to_error::deserialize(&self.0).map_err(|error| {
            let path = error.path().to_string();
            let inner = error.into_inner();
            if path == "." {
                ApiError::invalid(format!("the body is invalid: {inner}"))
            } else {
                ApiError::param(&path, format!("{path}: {inner}"))
            }
        })
    }
}

/// Reads a body. A body that is too large is read to its end, too: if the server closed the connection before, the client might not
/// receive the response.
async fn read(body: Body, max_bytes: usize) -> Result<Vec<u8>, ApiError> {
    let mut stream = body.into_data_stream();
    let mut bytes = Vec::new();
    let mut n_bytes = 0;
    while let Some(part) = stream.next().await {
        let part = part.map_err(|_| ApiError::invalid("the body is incomplete"))?;
        n_bytes += part.len();
        if n_bytes <= max_bytes {
            bytes.extend_from_slice(&part);
        } else {
            bytes = Vec::new();
        }
    }
    if n_bytes > max_bytes {
        return Err(ApiError::body_too_large(max_bytes));
    }
    Ok(bytes)
}
