//! `GET /` and `GET /ui/state`: a page with the live state of the server, and its data.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use axum::body::Body;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::http::HeaderValue;
use axum::http::header::{CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE};
use axum::response::{IntoResponse, Response};
use moe_placement::perf::LaneIndex;
use serde::Deserialize;
use serde_json::{Value, json};

use super::Shared;
use super::error::{ApiError, json_response};
use crate::recent::RecentRequest;

/// Path of the data.
pub(super) const STATE: &str = "/ui/state";

/// Value of `schema` in the data.
const SCHEMA: &str = "moe-analyze.live.v1";

/// A page with the live state of the server.
#[derive(Clone)]
pub struct Ui {
    page: Arc<str>,
    shows_text: bool,
    start: Instant,
}

impl Ui {
    /// A page, an HTML document that polls `GET /ui/state`. The data contains text of prompts and answers only if `shows_text` is set
    /// and the backend keeps the tokens of requests.
    pub fn new(page: impl Into<Arc<str>>, shows_text: bool) -> Ui {
        Ui {
            page: page.into(),
            shows_text,
            start: Instant::now(),
        }
    }
}

impl fmt::Debug for Ui {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ui")
            .field("shows_text", &self.shows_text)
            .finish_non_exhaustive()
    }
}

/// The settings of the page. The routes exist only with them.
fn settings(server: &Shared) -> Result<&Ui, ApiError> {
    let ui = server.options.ui.as_ref();
    ui.ok_or_else(|| ApiError::not_found("the server has no page"))
}

/// `GET /`.
pub(super) async fn page(State(server): State<Shared>) -> Result<Response, ApiError> {
    let page = settings(&server)?.page.to_string();
    let headers = [
        (CONTENT_TYPE, "text/html; charset=utf-8"),
        // The page itself restricts what it loads.
        (CONTENT_SECURITY_POLICY, "frame-ancestors 'none'"),
        (CACHE_CONTROL, "no-cache"),
    ];
    Ok((headers, Body::from(page)).into_response())
}

#[derive(Deserialize)]
pub(super) struct Parameters {
    request: Option<u32>,
}

/// `GET /ui/state?request=ID`: the state of the server, its recent requests, and the selected experts of one of them.
pub(super) async fn state(
    State(server): State<Shared>,
    parameters: Result<Query<Parameters>, QueryRejection>,
) -> Result<Response, ApiError> {
    let ui = settings(&server)?;
    let Query(parameters) =
        parameters.map_err(|error| ApiError::invalid(format!("the query is invalid: {error}")))?;
    let backend = &server.backend;
    let snapshot = backend.metrics();
    let lanes = LaneIndex::ALL.into_iter().zip(snapshot.selections);
    let lanes = lanes.filter_map(|(lane, selections)| {
        let tier = backend.tier(lane)?;
        Some(json!({"name": lane.name(), "tier": tier, "selections": selections}))
    });
    let lanes: Vec<Value> = lanes.collect();
    let requests = backend.recent_requests(parameters.request);
    let mut selected = requests.iter();
    let selected = selected.find(|request| Some(request.id) == parameters.request);
    let mut response = json_response(&json!({
        "schema": SCHEMA,
        "model": backend.model().name,
        "seconds": ui.start.elapsed().as_secs_f64(),
        "n_slots": snapshot.n_slots,
        "n_running": snapshot.n_running,
        "n_queued": snapshot.n_queued,
        "queue_capacity": snapshot.queue_capacity,
        "prompt_tokens": snapshot.prompt_tokens,
        "prompt_seconds": snapshot.prompt_time.as_secs_f64(),
        "generated_tokens": snapshot.generated_tokens,
        "generation_seconds": snapshot.generation_time.as_secs_f64(),
        "lanes": lanes,
        "requests": requests.iter().map(summary).collect::<Vec<_>>(),
        "selected": selected.map(|request| details(&server, request, ui.shows_text)),
    }));
    let headers = response.headers_mut();
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    Ok(response)
}

fn summary(request: &RecentRequest) -> Value {
    json!({
        "id": request.id,
        "outcome": request.outcome,
        "n_prompt": request.n_prompt,
        "n_generated": request.n_generated,
        "queue_seconds": request.queue_time.as_secs_f64(),
        "seconds": request.time.as_secs_f64(),
    })
}

/// The selections of a request, and its text if it is shown.
fn details(server: &Shared, request: &RecentRequest, shows_text: bool) -> Value {
    let layers = request.selections.iter();
    let layers = layers.map(|(layer, counts)| json!({"layer": layer, "selections": counts}));
    let mut details = json!({
        "id": request.id,
        "layers": layers.collect::<Vec<_>>(),
    });
    if shows_text && !request.tokens.is_empty() {
        let n_prompt = request.n_prompt.min(request.tokens.len());
        let (prompt, answer) = request.tokens.split_at(n_prompt);
        let text = |tokens: &[u32]| {
            let pieces = tokens.iter().map(|&token| server.backend.piece(token));
            let bytes: Vec<u8> = pieces.flatten().collect();
            String::from_utf8_lossy(&bytes).into_owned()
        };
        details["prompt"] = text(prompt).into();
        details["answer"] = text(answer).into();
    }
    details
}
