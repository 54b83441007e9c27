//! Log lines of requests: method, path, status, times and token counts; never text of a prompt or an answer.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use axum::extract::{MatchedPath, Request, State};
use axum::middleware::Next;
use axum::response::Response;

use super::{Shared, ui};

/// Receiver of log lines. The default prints them to stderr.
#[derive(Clone)]
pub struct Log(Arc<dyn Fn(&str) + Send + Sync>);

impl Log {
    /// A log that passes each line to `write`, without a line feed.
    pub fn new(write: impl Fn(&str) + Send + Sync + 'static) -> Log {
        Log(Arc::new(write))
    }

    pub(super) fn line(&self, line: fmt::Arguments) {
        (self.0)(&line.to_string());
    }
}

impl Default for Log {
    fn default() -> Log {
        Log::new(|line| eprintln!("{line}"))
    }
}

impl fmt::Debug for Log {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Log")
    }
}

/// Logs and counts a request when its response starts. Paths that do not exist are logged as `-`. Successful requests of the page for the
/// live state are counted only, because it sends them continually.
pub(super) async fn record(
    State(server): State<Shared>,
    path: Option<MatchedPath>,
    request: Request,
    next: Next,
) -> Response {
    let start = Instant::now();
    let method = request.method().clone();
    let response = next.run(request).await;
    let path = path.as_ref().map_or("-", MatchedPath::as_str);
    let status = response.status().as_u16();
    server.metrics.count_response(path, &method, status);
    if path == ui::STATE && status == 200 {
        return response;
    }
    let ms = start.elapsed().as_secs_f64() * 1e3;
    server
        .options
        .log
        .line(format_args!("{method} {path} {status} {ms:.1} ms"));
    response
}
