//! Requests to a router without a connection.

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::http::{HeaderMap, Request};
use http_body_util::BodyExt;
use moe_server::http::{Log, Options, router};
use serde_json::Value;
use tokio::runtime::Builder;
use tower::ServiceExt;

use crate::fake::Fake;
use crate::openapi::{check_response, events, is_valid_request};

/// A response.
pub struct Answer {
    pub status: u16,
    pub headers: HeaderMap,
    pub text: String,
}

impl Answer {
    /// The body as JSON.
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap()
    }

    /// The JSON data of the events of a stream.
    pub fn events(&self) -> Vec<Value> {
        events(&self.text)
    }

    /// The message of an error and the parameter that it names.
    pub fn error(&self) -> (String, Value) {
        let error = &self.json()["error"];
        (
            error["message"].as_str().unwrap().to_owned(),
            error["param"].clone(),
        )
    }
}

/// Options that log nothing.
pub fn options() -> Options {
    Options {
        log: Log::new(|_| {}),
        ..Options::default()
    }
}

/// The service of a backend.
pub fn service(backend: &Arc<Fake>) -> Router {
    router(backend.clone(), options())
}

/// A backend with the script `Hello world!`.
pub fn hello() -> Arc<Fake> {
    Arc::new(Fake::new(&[b"Hello", b" wor", b"ld", b"!"], 4))
}

/// Sends a request, and checks the response against the OpenAPI description.
#[track_caller]
pub fn send(router: &Router, request: Request<Body>) -> Answer {
    let (method, uri) = (request.method().to_string(), request.uri().to_string());
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    let answer = runtime.block_on(async {
        let response = router.clone().oneshot(request).await.unwrap();
        let (parts, body) = response.into_parts();
        let bytes = body.collect().await.unwrap().to_bytes();
        Answer {
            status: parts.status.as_u16(),
            headers: parts.headers,
            text: String::from_utf8(bytes.to_vec()).unwrap(),
        }
    });
    let content_type = answer.headers["content-type"].to_str().unwrap();
    check_response(&method, &uri, answer.status, content_type, &answer.text);
    answer
}

/// Sends a body that the OpenAPI description allows.
#[track_caller]
pub fn post(router: &Router, path: &str, body: &Value) -> Answer {
    assert!(is_valid_request("POST", path, body), "{body}");
    post_text(router, path, &body.to_string())
}

/// Sends a body.
#[track_caller]
pub fn post_text(router: &Router, path: &str, body: &str) -> Answer {
    let request = Request::post(path).body(Body::from(body.to_owned()));
    send(router, request.unwrap())
}

/// Sends a body that the OpenAPI description forbids. Returns the error of the response, which has the status 400.
#[track_caller]
pub fn rejected(router: &Router, path: &str, body: &Value) -> (String, Value) {
    assert!(!is_valid_request("POST", path, body), "{body}");
    let answer = post_text(router, path, &body.to_string());
    assert_eq!(answer.status, 400, "{body}");
    answer.error()
}

/// Sends a request, and drops it as soon as the backend has queued it.
pub fn disconnect(router: &Router, path: &str, body: &Value, backend: &Fake) {
    let n_before = backend.state().requests.len();
    let request = Request::post(path).body(Body::from(body.to_string()));
    let runtime = Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    let response = runtime.spawn(router.clone().oneshot(request.unwrap()));
    backend.wait_until(|state| state.requests.len() > n_before);
    response.abort();
    assert!(runtime.block_on(response).unwrap_err().is_cancelled());
}

#[track_caller]
pub fn get(router: &Router, path: &str) -> Answer {
    send(router, Request::get(path).body(Body::empty()).unwrap())
}
