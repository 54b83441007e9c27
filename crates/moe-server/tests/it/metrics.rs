//! `/metrics`.

use std::sync::Arc;

use serde_json::json;

use crate::client::{disconnect, get, hello, post, post_text, service};
use crate::fake::Fake;

/// The value of a metric.
#[track_caller]
fn value(text: &str, name: &str) -> f64 {
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix(&format!("{name} ")));
    line.unwrap_or_else(|| panic!("no {name} in {text}"))
        .parse()
        .unwrap()
}

#[test]
fn reports_counts_and_latencies() {
    let backend = hello();
    let router = service(&backend);
    post(&router, "/v1/completions", &json!({"prompt": "ab"}));
    post(
        &router,
        "/completion",
        &json!({"prompt": "ab", "stream": true}),
    );
    post_text(&router, "/completion", "");
    backend.wait_until(|state| state.n_running == 0);
    let answer = get(&router, "/metrics");
    assert_eq!(
        answer.headers["content-type"],
        "text/plain; version=0.0.4; charset=utf-8"
    );
    for (name, expected) in [
        ("moe_slots", 4.0),
        ("moe_running_requests", 0.0),
        ("moe_queued_requests", 0.0),
        ("moe_queue_capacity_requests", 4.0),
        ("moe_passes_total", 9.0),
        ("moe_failed_passes_total", 2.0),
        ("moe_prompt_tokens_total", 6.0),
        ("moe_prompt_tokens_per_second", 3.0),
        ("moe_generated_tokens_total", 8.0),
        ("moe_generated_tokens_per_second", 2.0),
        ("moe_requests_total{outcome=\"length\"}", 5.0),
        ("moe_requests_total{outcome=\"failed\"}", 1.0),
        (
            "moe_expert_selections_total{lane=\"hot0\",tier=\"gpu\"}",
            3.0,
        ),
        ("moe_expert_hit_ratio{lane=\"hot0\",tier=\"gpu\"}", 0.75),
        ("moe_expert_hit_ratio{lane=\"hot1\",tier=\"gpu\"}", 0.0),
        ("moe_expert_hit_ratio{lane=\"cold\",tier=\"ram\"}", 0.25),
        ("moe_cache_updates_total", 4.0),
        ("moe_exchanged_experts_total", 7.0),
        ("moe_traces_total{state=\"written\"}", 3.0),
        ("moe_traces_total{state=\"dropped\"}", 1.0),
        ("moe_traces_total{state=\"failed\"}", 0.0),
        (
            "moe_http_responses_total{path=\"/completion\",method=\"POST\",status=\"200\"}",
            1.0,
        ),
        (
            "moe_http_responses_total{path=\"/completion\",method=\"POST\",status=\"400\"}",
            1.0,
        ),
    ] {
        assert_eq!(value(&answer.text, name), expected, "{name}");
    }
    for name in [
        "queue_seconds",
        "first_token_seconds",
        "token_seconds",
        "request_seconds",
    ] {
        for (suffix, expected) in [
            ("_bucket{le=\"0.003\"}", 0.0),
            ("_bucket{le=\"0.01\"}", 1.0),
            ("_bucket{le=\"600\"}", 1.0),
            ("_bucket{le=\"+Inf\"}", 2.0),
            ("_sum", 700.01),
            ("_count", 2.0),
        ] {
            let name = format!("moe_{name}{suffix}");
            assert_eq!(value(&answer.text, &name), expected, "{name}");
        }
    }
    // The backend has no third hot lane.
    assert!(!answer.text.contains("hot2"), "{}", answer.text);
    assert!(
        !answer.text.contains("moe_cancelled_requests_total{"),
        "{}",
        answer.text
    );
}

/// The scheduler only knows that a request was cancelled. The endpoints report the reason.
#[test]
fn reports_why_requests_were_cancelled() {
    let backend = Arc::new(Fake::new(&[b"a", b"b"], 1));
    let router = service(&backend);
    // Otherwise the context can be full before the first token is read.
    backend.allow(Some(2));
    post(
        &router,
        "/completion",
        &json!({"prompt": "x", "stop": "b", "ignore_eos": true}),
    );
    backend.wait_until(|state| state.n_cancelled == 1);
    // One slot, which a request uses, and one place in the queue.
    backend.allow(Some(0));
    let one = json!({"prompt": "x"});
    std::thread::scope(|scope| {
        let running = scope.spawn(|| post(&service(&backend), "/v1/completions", &one).status);
        backend.wait_until(|state| state.requests.len() == 2);
        let answer = post(&router, "/v1/completions", &json!({"prompt": ["y", "z"]}));
        assert_eq!(answer.status, 429);
        backend.wait_until(|state| state.n_cancelled == 2);
        backend.allow(None);
        assert_eq!(running.join().unwrap(), 200);
    });
    backend.allow(Some(0));
    disconnect(
        &router,
        "/v1/completions",
        &json!({"prompt": "x"}),
        &backend,
    );
    backend.wait_until(|state| state.n_cancelled == 3);
    let text = get(&router, "/metrics").text;
    let lines: Vec<_> = text
        .lines()
        .filter_map(|line| line.strip_prefix("moe_cancelled_requests_total"))
        .collect();
    assert_eq!(
        lines,
        [
            "{endpoint=\"completion\",reason=\"stop_sequence\"} 1",
            "{endpoint=\"completions\",reason=\"disconnected\"} 1",
            "{endpoint=\"completions\",reason=\"other_prompt\"} 1",
        ]
    );
}

/// Each metric is described once, before its values, and has a name with the prefix `moe_`.
#[test]
fn follows_the_text_format() {
    let router = service(&hello());
    post(&router, "/v1/completions", &json!({"prompt": "ab"}));
    let text = get(&router, "/metrics").text;
    let mut described = Vec::new();
    for line in text.lines() {
        if let Some(description) = line.strip_prefix("# TYPE ") {
            let (name, kind) = description.split_once(' ').unwrap();
            assert!(["counter", "gauge", "histogram"].contains(&kind), "{line}");
            assert!(
                !described.contains(&name) && name.starts_with("moe_"),
                "{line}"
            );
            assert_eq!(name.ends_with("_total"), kind == "counter", "{line}");
            described.push(name);
        } else if !line.starts_with('#') {
            let name = line.split(['{', ' ']).next().unwrap();
            let last = described.last().unwrap();
            let suffix = name.strip_prefix(last).unwrap();
            assert!(
                ["", "_bucket", "_sum", "_count"].contains(&suffix),
                "{line}"
            );
            assert!(
                line.rsplit(' ').next().unwrap().parse::<f64>().is_ok(),
                "{line}"
            );
        }
    }
}
