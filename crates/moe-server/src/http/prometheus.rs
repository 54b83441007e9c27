//! `GET /metrics`: counts of the scheduler and of the endpoints in the text format of Prometheus.

use std::fmt::{self, Display, Write as _};

use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use moe_placement::perf::LaneIndex;

use super::metrics::Counts;
use super::{Backend, Shared};
use crate::metrics::{BUCKETS, Histogram, MetricsSnapshot};

/// `GET /metrics`.
pub(super) async fn report(State(server): State<Shared>) -> Response {
    let mut text = Text(String::new());
    let snapshot = server.backend.metrics();
    // Writing to a string does not fail.
    let _ = text.scheduler(&snapshot);
    let _ = text.cache(&snapshot, &*server.backend);
    let _ = text.endpoints(&server.metrics.lock());
    let headers = [(CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")];
    (headers, text.0).into_response()
}

/// A label of a value: its name and its value.
type Label<'a> = (&'static str, &'a str);

/// The text of the response.
struct Text(String);

impl Text {
    fn scheduler(&mut self, snapshot: &MetricsSnapshot) -> fmt::Result {
        let MetricsSnapshot {
            n_slots,
            n_running,
            n_queued,
            queue_capacity,
            passes,
            failed_passes,
            prompt_tokens,
            generated_tokens,
            requests,
            ..
        } = snapshot;
        let prompt_s = snapshot.prompt_time.as_secs_f64();
        let generation_s = snapshot.generation_time.as_secs_f64();
        self.gauge(
            "slots",
            "Requests that can be evaluated at the same time.",
            n_slots,
        )?;
        self.gauge(
            "running_requests",
            "Requests that are evaluated now.",
            n_running,
        )?;
        self.gauge("queued_requests", "Requests in the queue.", n_queued)?;
        self.gauge(
            "queue_capacity_requests",
            "Maximum of moe_queued_requests.",
            queue_capacity,
        )?;
        self.counter("passes_total", "Successful passes.", passes)?;
        self.counter("failed_passes_total", "Failed passes.", failed_passes)?;
        self.counter(
            "prompt_tokens_total",
            "Evaluated prompt tokens.",
            prompt_tokens,
        )?;
        self.counter(
            "prompt_seconds_total",
            "Time of passes that evaluated prompts.",
            prompt_s,
        )?;
        self.counter(
            "generated_tokens_total",
            "Generated tokens.",
            generated_tokens,
        )?;
        self.counter(
            "generation_seconds_total",
            "Time of passes that generated tokens.",
            generation_s,
        )?;
        let speed = |tokens: &u64, seconds: f64| {
            let speed = *tokens as f64 / seconds;
            if seconds > 0.0 { speed } else { 0.0 }
        };
        self.gauge(
            "prompt_tokens_per_second",
            "Average speed of prompts.",
            speed(prompt_tokens, prompt_s),
        )?;
        self.gauge(
            "generated_tokens_per_second",
            "Average speed of generation, all requests together.",
            speed(generated_tokens, generation_s),
        )?;
        self.describe("requests_total", "counter", "Requests by outcome.")?;
        for (&outcome, n) in requests {
            self.value("requests_total", &[("outcome", outcome)], n)?;
        }
        for (name, help, histogram) in [
            (
                "queue_seconds",
                "Time from a request to its start.",
                &snapshot.queue_time,
            ),
            (
                "first_token_seconds",
                "Time from a request to its first token.",
                &snapshot.first_token_time,
            ),
            (
                "token_seconds",
                "Time between two tokens of a request.",
                &snapshot.token_time,
            ),
            (
                "request_seconds",
                "Time from a request to its end.",
                &snapshot.request_time,
            ),
        ] {
            self.histogram(name, help, histogram)?;
        }
        let traces = &snapshot.traces;
        self.describe("traces_total", "counter", "Traces of requests by state.")?;
        for (state, n) in [
            ("written", traces.written),
            ("dropped", traces.dropped),
            ("failed", traces.failed),
        ] {
            self.value("traces_total", &[("state", state)], n)?;
        }
        Ok(())
    }

    fn cache(&mut self, snapshot: &MetricsSnapshot, backend: &dyn Backend) -> fmt::Result {
        let help = "Updates of the expert cache that exchanged experts.";
        self.counter("cache_updates_total", help, snapshot.cache_updates)?;
        let help = "Experts that updates exchanged.";
        self.counter("exchanged_experts_total", help, snapshot.exchanged_experts)?;
        let lanes = LaneIndex::ALL.into_iter().zip(snapshot.selections);
        let lanes: Vec<_> = lanes
            .filter_map(|(lane, n)| Some((lane.name(), backend.tier(lane)?, n)))
            .collect();
        let name = "expert_selections_total";
        let help = "Expert selections by lane and tier of the weights.";
        self.describe(name, "counter", help)?;
        for &(lane, tier, n) in &lanes {
            self.value(name, &[("lane", lane), ("tier", tier)], n)?;
        }
        let name = "expert_hit_ratio";
        let help = "Fraction of all expert selections in a lane and tier.";
        self.describe(name, "gauge", help)?;
        let all: u64 = snapshot.selections.iter().sum();
        for &(lane, tier, n) in lanes.iter().filter(|_| all > 0) {
            let ratio = n as f64 / all as f64;
            self.value(name, &[("lane", lane), ("tier", tier)], ratio)?;
        }
        Ok(())
    }

    fn endpoints(&mut self, counts: &Counts) -> fmt::Result {
        let name = "http_responses_total";
        self.describe(name, "counter", "Responses by path, method and status.")?;
        for ((path, method, status), n) in &counts.responses {
            let status = status.to_string();
            let labels = [
                ("path", path.as_str()),
                ("method", method.as_str()),
                ("status", status.as_str()),
            ];
            self.value(name, &labels, n)?;
        }
        let name = "cancelled_requests_total";
        let help = "Requests that an endpoint cancelled, by endpoint and reason.";
        self.describe(name, "counter", help)?;
        for (&(endpoint, reason), n) in &counts.cancelled {
            self.value(name, &[("endpoint", endpoint), ("reason", reason)], n)?;
        }
        Ok(())
    }

    fn gauge(&mut self, name: &str, help: &str, value: impl Display) -> fmt::Result {
        self.describe(name, "gauge", help)?;
        self.value(name, &[], value)
    }

    fn counter(&mut self, name: &str, help: &str, value: impl Display) -> fmt::Result {
        self.describe(name, "counter", help)?;
        self.value(name, &[], value)
    }

    fn histogram(&mut self, name: &str, help: &str, histogram: &Histogram) -> fmt::Result {
        self.describe(name, "histogram", help)?;
        let bucket = format!("{name}_bucket");
        let limits = BUCKETS.iter().map(f64::to_string);
        let limits = limits.chain(["+Inf".to_owned()]);
        let mut n = 0;
        for (limit, count) in limits.zip(histogram.counts) {
            n += count;
            self.value(&bucket, &[("le", limit.as_str())], n)?;
        }
        self.value(&format!("{name}_sum"), &[], histogram.sum)?;
        self.value(&format!("{name}_count"), &[], n)
    }

    fn describe(&mut self, name: &str, kind: &str, help: &str) -> fmt::Result {
        writeln!(self.0, "# HELP moe_{name} {help}\n# TYPE moe_{name} {kind}")
    }

    /// Writes a value.
    fn value(&mut self, name: &str, labels: &[Label], value: impl Display) -> fmt::Result {
        write!(self.0, "moe_{name}")?;
        for (index, (key, value)) in labels.iter().enumerate() {
            let open = if index == 0 { '{' } else { ',' };
            write!(self.0, "{open}{key}=\"{}\"", escape(value))?;
        }
        let close = if labels.is_empty() { "" } else { "}" };
        writeln!(self.0, "{close} {value}")
    }
}

/// A value of a label.
fn escape(value: &str) -> String {
    let value = value.replace('\\', "\\\\").replace('"', "\\\"");
    value.replace('\n', "\\n")
}
