//! Counts of the endpoints: what the scheduler does not know.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::http::Method;

use super::Shared;
use super::job::ms;
use crate::generation::Usage;

/// Counts of the endpoints since the start of the server.
#[derive(Default)]
pub(super) struct Metrics(Mutex<Counts>);

/// The counts at one time.
#[derive(Default)]
pub(super) struct Counts {
    /// Responses by path, method and status.
    pub(super) responses: BTreeMap<(String, String, u16), u64>,
    /// Requests that an endpoint cancelled, by endpoint and reason.
    pub(super) cancelled: BTreeMap<(&'static str, &'static str), u64>,
}

impl Metrics {
    /// Locks the counts. A thread that panicked leaves valid counts.
    pub(super) fn lock(&self) -> MutexGuard<'_, Counts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a response. Other methods than those of the endpoints are counted together, since clients can invent methods.
    pub(super) fn count_response(&self, path: &str, method: &Method, status: u16) {
        let method = match *method {
            Method::GET | Method::HEAD | Method::POST => method.as_str(),
            _ => "other",
        };
        let key = (path.to_owned(), method.to_owned(), status);
        *self.lock().responses.entry(key).or_default() += 1;
    }
}

/// How a request for text ended.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    /// The scheduler completed the text.
    Finished,
    /// The scheduler failed, or the time limit passed before the first token.
    Failed,
    /// The request was not queued.
    Rejected,
    /// The text reached a stop sequence.
    StopSequence,
    /// The client did not wait for the end.
    Disconnected,
    /// Another prompt of the same request failed or was rejected.
    OtherPrompt,
    /// The server stopped before the end.
    Shutdown,
}

impl Outcome {
    /// Name in log lines and metrics.
    fn name(self) -> &'static str {
        match self {
            Outcome::Finished => "finished",
            Outcome::Failed => "failed",
            Outcome::Rejected => "rejected",
            Outcome::StopSequence => "stop_sequence",
            Outcome::Disconnected => "disconnected",
            Outcome::OtherPrompt => "other_prompt",
            Outcome::Shutdown => "shutdown",
        }
    }

    /// Whether the endpoint cancelled the request. The scheduler counts the other outcomes.
    fn is_cancelled(self) -> bool {
        !matches!(
            self,
            Outcome::Finished | Outcome::Failed | Outcome::Rejected
        )
    }
}

/// Counts and times of one request. Dropping it counts and logs the request.
pub(super) struct Record {
    server: Shared,
    endpoint: &'static str,
    /// How the request ended; [`Outcome::Disconnected`] unless set.
    pub(super) outcome: Outcome,
    /// Whether a prompt of the request failed.
    has_failed: Arc<AtomicBool>,
    n_prompt: usize,
    n_generated: usize,
    start: Instant,
    first_token: Option<Instant>,
    last_token: Option<Instant>,
}

impl Record {
    /// Starts the record of a prompt. The prompts of a request share `has_failed`.
    pub(super) fn new(
        server: &Shared,
        endpoint: &'static str,
        n_prompt: usize,
        has_failed: &Arc<AtomicBool>,
    ) -> Record {
        Record {
            server: Arc::clone(server),
            endpoint,
            outcome: Outcome::Disconnected,
            has_failed: Arc::clone(has_failed),
            n_prompt,
            n_generated: 0,
            start: Instant::now(),
            first_token: None,
            last_token: None,
        }
    }

    /// Number of generated tokens.
    pub(super) fn n_generated(&self) -> usize {
        self.n_generated
    }

    /// Counts a generated token.
    pub(super) fn add_token(&mut self) {
        let now = Instant::now();
        self.n_generated += 1;
        self.first_token.get_or_insert(now);
        self.last_token = Some(now);
    }

    /// Sets the outcome of a prompt that ends with an error. The request ends with it, so that its other prompts are cancelled.
    pub(super) fn fail(&mut self, outcome: Outcome) {
        self.outcome = outcome;
        self.has_failed.store(true, Ordering::Relaxed);
    }

    /// Counts and times so far, for a request that ends before the scheduler reports them. The time of the prompt includes
    /// the time in the queue.
    pub(super) fn usage(&self) -> Usage {
        let first = self.first_token.unwrap_or(self.start);
        let last = self.last_token.unwrap_or(first);
        Usage {
            n_prompt: self.n_prompt,
            n_generated: self.n_generated,
            queue_time: Duration::ZERO,
            prompt_time: first - self.start,
            generation_time: last - first,
        }
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        let outcome = match self.outcome {
            Outcome::Disconnected if self.has_failed.load(Ordering::Relaxed) => {
                Outcome::OtherPrompt
            }
            outcome => outcome,
        };
        let name = outcome.name();
        if outcome.is_cancelled() {
            let mut counts = self.server.metrics.lock();
            *counts.cancelled.entry((self.endpoint, name)).or_default() += 1;
        }
        self.server.options.log.line(format_args!(
            "{}: {name}, {} prompt tokens, {} generated tokens, {:.1} ms",
            self.endpoint,
            self.n_prompt,
            self.n_generated,
            ms(self.start.elapsed()),
        ));
    }
}
