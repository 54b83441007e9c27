//! `/metrics`.

use serde_json::json;

use crate::client::{get, hello, post, post_text, service};

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
        ("moe_prompt_tokens_total", 6.0),
        ("moe_prompt_tokens_per_second", 3.0),
        ("moe_generated_tokens_total", 8.0),
        ("moe_generated_tokens_per_second", 2.0),
        (
            "moe_expert_selections_total{lane=\"hot0\",tier=\"gpu\"}",
            3.0,
        ),
        ("moe_expert_hit_ratio{lane=\"hot0\",tier=\"gpu\"}", 0.75),
        ("moe_expert_hit_ratio{lane=\"cold\",tier=\"ram\"}", 0.25),
        (
            "moe_http_responses_total{path=\"/completion\",method=\"POST\",status=\"200\"}",
            1.0,
        ),
        (
            "moe_http_responses_total{path=\"/completion\",method=\"POST\",status=\"400\"}",
            1.0,
        ),
        (
            "moe_requests_total{endpoint=\"completions\",outcome=\"finished\"}",
            1.0,
        ),
        (
            "moe_requests_total{endpoint=\"completion\",outcome=\"finished\"}",
            1.0,
        ),
        ("moe_queue_seconds_bucket{le=\"0.01\"}", 2.0),
        ("moe_queue_seconds_sum", 0.002),
        ("moe_queue_seconds_count", 2.0),
        ("moe_first_token_seconds_count", 2.0),
        ("moe_request_seconds_bucket{le=\"+Inf\"}", 2.0),
    ] {
        assert_eq!(value(&answer.text, name), expected, "{name}");
    }
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
