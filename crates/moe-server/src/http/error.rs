//! Errors as responses, in the format of the OpenAI API.

use axum::body::Body;
use axum::http::header::{CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE};
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use crate::scheduler::SubmitError;

/// An error response. Its body is `{"error": {"message", "type", "param", "code"}}`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct ApiError {
    status: StatusCode,
    kind: &'static str,
    message: String,
    param: Option<String>,
    code: Option<&'static str>,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> ApiError {
        ApiError {
            status,
            kind,
            message: message.into(),
            param: None,
            code: None,
        }
    }

    /// 400: the request is wrong.
    pub(super) fn invalid(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::BAD_REQUEST, "invalid_request_error", message)
    }

    /// 400: a parameter of the request is wrong.
    pub(super) fn param(param: impl Into<String>, message: impl Into<String>) -> ApiError {
        ApiError {
            param: Some(param.into()),
            ..ApiError::invalid(message)
        }
    }

    /// 401: the API key is missing or wrong.
    pub(super) fn unauthorized() -> ApiError {
        let message = "the API key is missing or wrong; send it as `Authorization: Bearer KEY`";
        ApiError {
            code: Some("invalid_api_key"),
            ..ApiError::new(StatusCode::UNAUTHORIZED, "authentication_error", message)
        }
    }

    /// 403: a web page of another site sent the request.
    pub(super) fn other_site() -> ApiError {
        let message =
            "without an API key, requests of other sites are refused; start the server with a key";
        ApiError::new(StatusCode::FORBIDDEN, "permission_error", message)
    }

    /// 404.
    pub(super) fn not_found(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::NOT_FOUND, "not_found_error", message)
    }

    /// 405.
    pub(super) fn method_not_allowed() -> ApiError {
        let message = "the path does not support this method; see the header Allow";
        ApiError::new(
            StatusCode::METHOD_NOT_ALLOWED,
            "invalid_request_error",
            message,
        )
    }

    /// 408: the time limit has passed.
    pub(super) fn timeout(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::REQUEST_TIMEOUT, "timeout_error", message)
    }

    /// 409: the request does not fit the server: it has no such part, or another model.
    pub(super) fn conflict(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::CONFLICT, "conflict_error", message)
    }

    /// 413: the body is too large.
    pub(super) fn body_too_large(max_bytes: usize) -> ApiError {
        let message = format!("the body is larger than the limit of {max_bytes} bytes");
        ApiError::new(
            StatusCode::PAYLOAD_TOO_LARGE,
            "invalid_request_error",
            message,
        )
    }

    /// 500: the server failed.
    pub(super) fn internal(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message)
    }

    /// 503: the server shuts down.
    pub(super) fn shutting_down() -> ApiError {
        let message = SubmitError::ShuttingDown.to_string();
        ApiError::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "unavailable_error",
            message,
        )
    }

    /// The body, which is also the last event of a stream that fails.
    pub(super) fn body(&self) -> Value {
        json!({"error": {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }})
    }
}

impl From<SubmitError> for ApiError {
    fn from(error: SubmitError) -> ApiError {
        let message = error.to_string();
        match error {
            SubmitError::QueueFull => ApiError {
                code: Some("queue_full"),
                ..ApiError::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message)
            },
            SubmitError::ShuttingDown => ApiError::shutting_down(),
            SubmitError::PromptTooLong { .. } => ApiError {
                code: Some("context_length_exceeded"),
                ..ApiError::invalid(message)
            },
            SubmitError::TokenOutOfRange { .. } | SubmitError::EmptyPrompt => {
                ApiError::invalid(message)
            }
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = json_response(&self.body());
        *response.status_mut() = self.status;
        let header = match self.status {
            StatusCode::TOO_MANY_REQUESTS => Some((RETRY_AFTER, "1")),
            StatusCode::UNAUTHORIZED => Some((WWW_AUTHENTICATE, "Bearer")),
            _ => None,
        };
        if let Some((name, value)) = header {
            let headers = response.headers_mut();
            headers.insert(name, HeaderValue::from_static(value));
        }
        response
    }
}

/// A response with a JSON body.
pub(super) fn json_response(body: &Value) -> Response {
    json_text(body.to_string())
}

/// A response with a body that is JSON already.
pub(super) fn json_text(body: String) -> Response {
    ([(CONTENT_TYPE, "application/json")], Body::from(body)).into_response()
}
