//! `GET /metrics`: counts in the text format of Prometheus.

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::extract::State;
use axum::http::Method;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};

use super::job::ms;
use super::{Shared, Snapshot};
use crate::generation::Usage;

/// Upper limits of the histograms, in seconds.
const BUCKETS: [f64; 12] = [
    0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0,
];

/// Counts of the endpoints since the start of the server.
#[derive(Default)]
pub(super) struct Metrics(Mutex<Counts>);

#[derive(Default)]
struct Counts {
    /// Responses by path, method and status.
    responses: BTreeMap<(String, String, u16), u64>,
    /// Requests by endpoint and outcome.
    requests: BTreeMap<(&'static str, &'static str), u64>,
    queue: Histogram,
    first_token: Histogram,
    duration: Histogram,
}

#[derive(Default)]
struct Histogram {
    /// Number of values for each element of [`BUCKETS`] and above.
    counts: [u64; BUCKETS.len() + 1],
    sum: f64,
}

impl Histogram {
    fn add(&mut self, time: Duration) {
        let seconds = time.as_secs_f64();
        self.counts[BUCKETS.partition_point(|limit| *limit < seconds)] += 1;
        self.sum += seconds;
    }
}

impl Metrics {
    fn lock(&self) -> MutexGuard<'_, Counts> {
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

/// How a request ended.
pub(super) enum Outcome {
    /// The text is complete.
    Finished(Usage),
    /// The scheduler failed, the time limit passed, or the server shut down.
    Failed,
    /// The request was not queued.
    Rejected,
    /// The client did not wait for the end.
    Disconnected,
}

impl Outcome {
    fn name(&self) -> &'static str {
        match self {
            Outcome::Finished(_) => "finished",
            Outcome::Failed => "failed",
            Outcome::Rejected => "rejected",
            Outcome::Disconnected => "disconnected",
        }
    }
}

/// Counts and times of one request. Dropping it counts and logs the request.
pub(super) struct Record {
    server: Shared,
    endpoint: &'static str,
    /// How the request ended; [`Outcome::Disconnected`] unless set.
    pub(super) outcome: Outcome,
    n_prompt: usize,
    n_generated: usize,
    start: Instant,
    first_token: Option<Instant>,
    last_token: Option<Instant>,
}

impl Record {
    pub(super) fn new(server: &Shared, endpoint: &'static str, n_prompt: usize) -> Record {
        Record {
            server: Arc::clone(server),
            endpoint,
            outcome: Outcome::Disconnected,
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
        let duration = self.start.elapsed();
        let mut counts = self.server.metrics.lock();
        let key = (self.endpoint, self.outcome.name());
        *counts.requests.entry(key).or_default() += 1;
        if let Outcome::Finished(usage) = &self.outcome {
            counts.queue.add(usage.queue_time);
            counts.duration.add(duration);
        }
        if let Some(first_token) = self.first_token {
            counts.first_token.add(first_token - self.start);
        }
        drop(counts);
        self.server.options.log.line(format_args!(
            "{}: {}, {} prompt tokens, {} generated tokens, {:.1} ms",
            self.endpoint,
            self.outcome.name(),
            self.n_prompt,
            self.n_generated,
            ms(duration),
        ));
    }
}

/// `GET /metrics`.
pub(super) async fn report(State(server): State<Shared>) -> Response {
    let mut text = String::new();
    // Writing to a string does not fail.
    let _ = write_scheduler(&mut text, &server.backend.metrics());
    let _ = write_counts(&mut text, &server.metrics.lock());
    let headers = [(CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")];
    (headers, text).into_response()
}

fn write_scheduler(text: &mut String, snapshot: &Snapshot) -> fmt::Result {
    let mut number = |name: &str, kind: &str, help: &str, value: f64| {
        describe(text, name, kind, help)?;
        writeln!(text, "{name} {value}")
    };
    let prompt_s = snapshot.prompt_time.as_secs_f64();
    let generation_s = snapshot.generation_time.as_secs_f64();
    for (name, help, value) in [
        (
            "moe_slots",
            "Requests that can be evaluated at the same time.",
            snapshot.n_slots,
        ),
        (
            "moe_running_requests",
            "Requests that are evaluated now.",
            snapshot.n_running,
        ),
        (
            "moe_queued_requests",
            "Requests in the queue.",
            snapshot.n_queued,
        ),
        (
            "moe_queue_capacity_requests",
            "Maximum of moe_queued_requests.",
            snapshot.queue_capacity,
        ),
    ] {
        number(name, "gauge", help, value as f64)?;
    }
    for (name, help, value) in [
        (
            "moe_prompt_tokens_total",
            "Evaluated prompt tokens.",
            snapshot.prompt_tokens as f64,
        ),
        (
            "moe_prompt_seconds_total",
            "Time of passes that evaluated prompts.",
            prompt_s,
        ),
        (
            "moe_generated_tokens_total",
            "Generated tokens.",
            snapshot.generated_tokens as f64,
        ),
        (
            "moe_generation_seconds_total",
            "Time of passes that generated tokens.",
            generation_s,
        ),
    ] {
        number(name, "counter", help, value)?;
    }
    for (name, help, tokens, seconds) in [
        (
            "moe_prompt_tokens_per_second",
            "Average speed of prompts.",
            snapshot.prompt_tokens,
            prompt_s,
        ),
        (
            "moe_generated_tokens_per_second",
            "Average speed of generation, all requests together.",
            snapshot.generated_tokens,
            generation_s,
        ),
    ] {
        let speed = if seconds > 0.0 {
            tokens as f64 / seconds
        } else {
            0.0
        };
        number(name, "gauge", help, speed)?;
    }
    write_selections(text, snapshot)
}

fn write_selections(text: &mut String, snapshot: &Snapshot) -> fmt::Result {
    let selections = &snapshot.selections;
    let name = "moe_expert_selections_total";
    describe(
        text,
        name,
        "counter",
        "Expert selections by lane and tier of the weights.",
    )?;
    for part in selections {
        let (lane, tier) = (escape(&part.lane), escape(&part.tier));
        writeln!(
            text,
            "{name}{{lane=\"{lane}\",tier=\"{tier}\"}} {}",
            part.count
        )?;
    }
    let name = "moe_expert_hit_ratio";
    describe(
        text,
        name,
        "gauge",
        "Fraction of all expert selections in a lane and tier.",
    )?;
    let all: u64 = selections.iter().map(|part| part.count).sum();
    for part in selections.iter().filter(|_| all > 0) {
        let (lane, tier) = (escape(&part.lane), escape(&part.tier));
        let ratio = part.count as f64 / all as f64;
        writeln!(text, "{name}{{lane=\"{lane}\",tier=\"{tier}\"}} {ratio}")?;
    }
    Ok(())
}

fn write_counts(text: &mut String, counts: &Counts) -> fmt::Result {
    let name = "moe_http_responses_total";
    describe(
        text,
        name,
        "counter",
        "Responses by path, method and status.",
    )?;
    for ((path, method, status), n) in &counts.responses {
        let path = escape(path);
        writeln!(
            text,
            "{name}{{path=\"{path}\",method=\"{method}\",status=\"{status}\"}} {n}"
        )?;
    }
    let name = "moe_requests_total";
    describe(
        text,
        name,
        "counter",
        "Requests for text by endpoint and outcome.",
    )?;
    for ((endpoint, outcome), n) in &counts.requests {
        writeln!(
            text,
            "{name}{{endpoint=\"{endpoint}\",outcome=\"{outcome}\"}} {n}"
        )?;
    }
    for (name, help, histogram) in [
        (
            "moe_queue_seconds",
            "Time of finished requests in the queue.",
            &counts.queue,
        ),
        (
            "moe_first_token_seconds",
            "Time from a request to its first token.",
            &counts.first_token,
        ),
        (
            "moe_request_seconds",
            "Time from a request to its last token.",
            &counts.duration,
        ),
    ] {
        describe(text, name, "histogram", help)?;
        let mut n = 0;
        for (limit, count) in BUCKETS.iter().zip(histogram.counts) {
            n += count;
            writeln!(text, "{name}_bucket{{le=\"{limit}\"}} {n}")?;
        }
        n += histogram.counts[BUCKETS.len()];
        writeln!(text, "{name}_bucket{{le=\"+Inf\"}} {n}")?;
        writeln!(text, "{name}_sum {}\n{name}_count {n}", histogram.sum)?;
    }
    Ok(())
}

fn describe(text: &mut String, name: &str, kind: &str, help: &str) -> fmt::Result {
    writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}")
}

/// A value of a label.
fn escape(value: &str) -> String {
    let value = value.replace('\\', "\\\\").replace('"', "\\\"");
    value.replace('\n', "\\n")
}
