//! The HTTP endpoints: OpenAI's API, endpoints of llama-server, the expert cache, metrics, and a page with the live state.
//!
//! ```text
//! request ── auth ── body ──► openai, llama ──► Job ──► Generation ──► respond ──► JSON or a stream of events
//!                                                │          ▲
//!                                                ▼          │ Event
//!                                            Backend::submit (queue, scheduler)
//! ```
//!
//! [`serve`] accepts connections; [`router`] is the service of one connection. The endpoints use the model only through
//! [`Backend`]. The page `docs/http-api.md` describes the API, `schemas/openapi.json` its bodies.

mod auth;
mod backend;
mod body;
mod cache;
mod connection;
mod error;
mod integer;
mod job;
mod llama;
mod log;
mod metrics;
mod openai;
mod options;
mod prometheus;
mod respond;
mod sampling;
mod serve;
mod text;
mod tokens;
mod ui;

use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::http::Uri;
use axum::middleware::from_fn_with_state;
use axum::response::Response;
use axum::routing::{get, post};
use serde_json::json;
use tokio::sync::watch;

pub use auth::ApiKey;
pub use backend::{
    Backend, Chat, EventReceiver, HotCacheError, HotCacheUpdate, ModelInfo, SavedFile,
};
pub use log::Log;
pub use options::Options;
pub use serve::{ServeError, serve};
pub use ui::Ui;

use error::{ApiError, json_response};
use metrics::Metrics;
use serve::Phase;

/// What the endpoints share.
struct Server {
    backend: Arc<dyn Backend>,
    options: Options,
    metrics: Metrics,
    phase: watch::Receiver<Phase>,
}

type Shared = Arc<Server>;

impl Server {
    /// Runs a function of the backend that may block.
    async fn blocking<T: Send + 'static>(
        &self,
        call: impl FnOnce(&dyn Backend) -> T + Send + 'static,
    ) -> Result<T, ApiError> {
        let backend = Arc::clone(&self.backend);
        let task = tokio::task::spawn_blocking(move || call(&*backend));
        task.await
            .map_err(|_| ApiError::internal("the request failed unexpectedly"))
    }

    /// # Errors
    /// The server shuts down and accepts no more requests.
    fn check_running(&self) -> Result<(), ApiError> {
        let is_running = *self.phase.borrow() == Phase::Running;
        is_running.then_some(()).ok_or_else(ApiError::shutting_down)
    }
}

/// The service of all endpoints, without the limits of [`serve`] on connections.
pub fn router(backend: Arc<dyn Backend>, options: Options) -> Router {
    routes(backend, options, watch::channel(Phase::Running).1)
}

fn routes(backend: Arc<dyn Backend>, options: Options, phase: watch::Receiver<Phase>) -> Router {
    let has_ui = options.ui.is_some();
    let server = Arc::new(Server {
        backend,
        options,
        metrics: Metrics::default(),
        phase,
    });
    let mut router = Router::new();
    if has_ui {
        router = router
            .route("/", get(ui::page))
            .route(ui::STATE, get(ui::state));
    }
    router
        .route("/v1/completions", post(openai::completions::create))
        .route("/v1/chat/completions", post(openai::chat::create))
        .route("/v1/models", get(openai::models::list))
        .route("/v1/models/{*model}", get(openai::models::retrieve))
        .route("/completion", post(llama::create))
        .route("/tokenize", post(tokens::tokenize))
        .route("/detokenize", post(tokens::detokenize))
        .route("/moe-layer-perf", get(cache::report).post(cache::set_mode))
        .route(
            "/moe-hot-cache",
            get(cache::apply_query).post(cache::apply_body),
        )
        .route("/health", get(health))
        .route("/metrics", get(prometheus::report))
        .fallback(async |uri: Uri| ApiError::not_found(format!("there is no path {}", uri.path())))
        .method_not_allowed_fallback(async || ApiError::method_not_allowed())
        .layer(from_fn_with_state(Arc::clone(&server), auth::check))
        .layer(from_fn_with_state(Arc::clone(&server), log::record))
        .with_state(server)
}

/// `GET /health`.
async fn health(State(server): State<Shared>) -> Result<Response, ApiError> {
    server.check_running()?;
    Ok(json_response(&json!({"status": "ok"})))
}
