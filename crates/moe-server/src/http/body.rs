//! Bodies of requests.

use axum::body::Body;
use axum::extract::{FromRequest, Request};
use futures_util::StreamExt;
use serde::de::DeserializeOwned;

use super::Shared;
use super::error::ApiError;

/// The body of a request: JSON of any content type.
pub(super) struct JsonBody(Vec<u8>);

impl FromRequest<Shared> for JsonBody {
    type Rejection = ApiError;

    async fn from_request(request: Request, server: &Shared) -> Result<JsonBody, ApiError> {
        let options = &server.options;
        let body = read(request.into_body(), options.max_body_bytes);
        tokio::time::timeout(options.read_timeout, body)
            .await
            .map_err(|_| ApiError::timeout("the body was not received within the time limit"))?
            .map(JsonBody)
    }
}

impl JsonBody {
    /// The body as `T`. Unknown keys are ignored, so that a body can be read as several types.
    ///
    /// # Errors
    /// The body is not JSON, or a value has a wrong type.
    pub(super) fn parse<T: DeserializeOwned>(&self) -> Result<T, ApiError> {
        let mut json = serde_json::Deserializer::from_slice(&self.0);
        let value = serde_path_to_error::deserialize(&mut json).map_err(|error| {
            let path = error.path().to_string();
            let inner = error.into_inner();
            // A number that the type cannot contain is a syntax error for serde_json.
            let is_value = inner.is_data() || inner.to_string().starts_with("number out of range");
            if path == "." || !is_value {
                ApiError::invalid(format!("the body is invalid: {inner}"))
            } else {
                ApiError::param(&path, format!("{path}: {inner}"))
            }
        })?;
        json.end()
            .map_err(|error| ApiError::invalid(format!("the body is invalid: {error}")))?;
        Ok(value)
    }
}

async fn read(body: Body, max_bytes: usize) -> Result<Vec<u8>, ApiError> {
    let mut stream = body.into_data_stream();
    let mut bytes = Vec::new();
    while let Some(part) = stream.next().await {
        let part = part.map_err(|_| ApiError::invalid("the body is incomplete"))?;
        if bytes.len() + part.len() > max_bytes {
            return Err(ApiError::body_too_large(max_bytes));
        }
        bytes.extend_from_slice(&part);
    }
    Ok(bytes)
}
