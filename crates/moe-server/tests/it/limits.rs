//! Keys, limits, other paths and methods, log lines.

use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use axum::http::{Method, Request};
use futures_util::stream::{self, StreamExt};
use moe_server::http::{ApiKey, Log, Options, router};
use serde_json::json;

use crate::client::{Answer, get, hello, options, post, post_text, send, service};
use crate::fake::Fake;

const PATHS: [(&str, &str); 13] = [
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/fake/model"),
    ("POST", "/completion"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/moe-layer-perf"),
    ("POST", "/moe-layer-perf"),
    ("GET", "/moe-hot-cache"),
    ("POST", "/moe-hot-cache"),
    ("GET", "/metrics"),
    ("GET", "/nothing"),
];

fn with_key() -> Router {
    let options = Options {
        api_key: ApiKey::new("secret"),
        ..options()
    };
    router(hello(), options)
}

#[track_caller]
fn get_with(router: &Router, path: &str, header: (&str, &str)) -> Answer {
    let request = Request::get(path).header(header.0, header.1);
    send(router, request.body(Body::empty()).unwrap())
}

#[test]
fn requires_the_key() {
    let router = with_key();
    for (method, path) in PATHS {
        let request = Request::builder().method(method).uri(path);
        let answer = send(&router, request.body(Body::empty()).unwrap());
        assert_eq!(answer.status, 401, "{path}");
        assert_eq!(answer.headers["www-authenticate"], "Bearer");
        assert_eq!(answer.json()["error"]["code"], "invalid_api_key");
    }
    assert_eq!(get(&router, "/health").json(), json!({"status": "ok"}));
}

#[test]
fn accepts_the_key_in_two_headers() {
    let router = with_key();
    for (name, value, status) in [
        ("authorization", "Bearer secret", 200),
        ("authorization", "bearer secret", 200),
        ("x-api-key", "secret", 200),
        ("authorization", "Bearer secret2", 401),
        ("authorization", "Bearer secre", 401),
        ("authorization", "Bearer ", 401),
        ("authorization", "Basic secret", 401),
        ("authorization", "secret", 401),
        ("x-api-key", "", 401),
    ] {
        assert_eq!(
            get_with(&router, "/v1/models", (name, value)).status,
            status,
            "{name}: {value}"
        );
    }
}

#[test]
fn refuses_web_pages_of_other_sites_without_a_key() {
    let router = service(&hello());
    for (name, value, status) in [
        ("host", "127.0.0.1:8080", 200),
        ("host", "localhost", 200),
        ("host", "example.org", 403),
        ("origin", "http://localhost:3000", 200),
        ("origin", "https://example.org", 403),
        ("origin", "null", 403),
        ("sec-fetch-site", "same-origin", 200),
        ("sec-fetch-site", "cross-site", 403),
    ] {
        assert_eq!(
            get_with(&router, "/v1/models", (name, value)).status,
            status,
            "{name}: {value}"
        );
    }
}

#[test]
fn answers_other_paths_and_methods_with_errors() {
    let router = service(&hello());
    let answer = get(&router, "/nothing");
    assert_eq!(
        (answer.status, answer.error().0),
        (404, "there is no path /nothing".into())
    );
    for (method, path) in PATHS {
        let request = Request::builder().method(Method::DELETE).uri(path);
        let answer = send(&router, request.body(Body::empty()).unwrap());
        if path != "/nothing" {
            assert_eq!(answer.status, 405, "{path}");
            let allow = answer.headers["allow"].to_str().unwrap();
            assert!(allow.contains(method), "{path}: {allow}");
        }
    }
}

#[test]
fn limits_the_size_of_a_body() {
    let options = Options {
        max_body_bytes: 40,
        ..options()
    };
    let router = router(hello(), options);
    let body = |n| format!("{{\"content\": \"{}\"}}", "a".repeat(n));
    assert_eq!(post_text(&router, "/tokenize", &body(25)).status, 200);
    let answer = post_text(&router, "/tokenize", &body(26));
    let expected = "the body is larger than the limit of 40 bytes";
    assert_eq!((answer.status, answer.error().0), (413, expected.into()));
}

/// The limit passes before the first token: an error.
#[test]
fn a_request_without_a_token_fails_at_the_time_limit() {
    let backend = hello();
    backend.allow(Some(0));
    let options = Options {
        request_timeout: Duration::from_millis(1),
        ..options()
    };
    let router = router(backend, options);
    for path in ["/v1/completions", "/completion"] {
        let answer = post(&router, path, &json!({"prompt": "a"}));
        assert_eq!(answer.status, 408);
        let body = json!({"prompt": "a", "stream": true});
        let events = post(&router, path, &body).events();
        assert_eq!(events[0]["error"]["type"], "timeout_error");
        assert_eq!(events.len(), 1);
    }
}

/// The limit passes later: the response contains the text so far. OpenAI's API has no finish reason for it.
#[test]
fn responses_report_the_time_limit() {
    let mut backend = Fake::new(&[b"Hello", b" world"], 1);
    backend.time_limit = Some(1);
    let router = service(&Arc::new(backend));
    let answer = post(&router, "/completion", &json!({"prompt": "a"})).json();
    assert_eq!(
        (&answer["content"], &answer["stop_type"]),
        (&json!("Hello"), &json!("limit"))
    );
    assert_eq!(answer["timed_out"], true);
    let body = json!({"prompt": "a", "n_predict": 1});
    let answer = post(&router, "/completion", &body).json();
    assert_eq!(
        (&answer["stop_type"], &answer["timed_out"]),
        (&json!("limit"), &json!(false))
    );
    let events = post(
        &router,
        "/completion",
        &json!({"prompt": "a", "stream": true}),
    );
    assert_eq!(events.events()[1]["timed_out"], true);
    let choice = post(&router, "/v1/completions", &json!({"prompt": "a"})).json();
    assert_eq!(choice["choices"][0]["text"], "Hello");
    assert_eq!(choice["choices"][0]["finish_reason"], "length");
}

#[test]
fn the_scheduler_gets_the_time_limit() {
    let backend = hello();
    let options = Options {
        request_timeout: Duration::from_secs(1000),
        ..options()
    };
    let before = Instant::now();
    post(
        &router(backend.clone(), options),
        "/completion",
        &json!({"prompt": "a"}),
    );
    let deadline = backend.state().requests[0].deadline.unwrap();
    let limit = Duration::from_secs(1000);
    assert!(before + limit <= deadline && deadline <= Instant::now() + limit);
}

/// A client that stops in the middle of a body.
#[test]
fn limits_the_time_of_a_body() {
    let options = Options {
        read_timeout: Duration::from_millis(1),
        ..options()
    };
    let start = stream::once(async { Ok::<_, Infallible>("{\"prompt\": ") });
    let body = Body::from_stream(start.chain(stream::pending()));
    let request = Request::post("/completion").body(body).unwrap();
    let answer = send(&router(hello(), options), request);
    assert_eq!(answer.status, 408);
    assert_eq!(
        answer.error().0,
        "the body was not received within the time limit"
    );
}

#[test]
fn ends_when_the_context_is_full() {
    let backend = hello();
    let body = json!({"prompt": "a".repeat(4090), "ignore_eos": true, "max_tokens": 1000});
    let answer = post(&service(&backend), "/v1/completions", &body).json();
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    assert_eq!(answer["usage"]["completion_tokens"], 5);
}

#[test]
fn rejects_requests_beyond_the_queue() {
    let backend = Arc::new(Fake::new(&[b"a"], 1));
    backend.allow(Some(0));
    let router = service(&backend);
    let one = json!({"prompt": "a"});
    std::thread::scope(|scope| {
        let running = scope.spawn(|| post(&service(&backend), "/v1/completions", &one).status);
        backend.wait_until(|state| state.requests.len() == 1);
        let answer = post(&router, "/v1/completions", &json!({"prompt": ["b", "c"]}));
        assert_eq!(answer.status, 429);
        assert_eq!(answer.headers["retry-after"], "1");
        assert_eq!(answer.json()["error"]["code"], "queue_full");
        // The prompt that was queued is cancelled.
        backend.wait_until(|state| state.n_cancelled == 1);
        backend.allow(None);
        assert_eq!(running.join().unwrap(), 200);
    });
    assert_eq!(post(&router, "/v1/completions", &one).status, 200);
}

/// Sending them again later would not help.
#[test]
fn rejects_more_prompts_than_an_idle_server_accepts() {
    let backend = Arc::new(Fake::new(&[b"a"], 1));
    let router = service(&backend);
    let answer = post(
        &router,
        "/v1/completions",
        &json!({"prompt": ["a", "b", "c"]}),
    );
    assert_eq!(answer.status, 400);
    let (message, param) = answer.error();
    assert!(
        message.contains("3 prompts are out of range (1..=2)"),
        "{message}"
    );
    assert_eq!(param, "prompt");
    let answer = post(&router, "/v1/completions", &json!({"prompt": ["a", "b"]}));
    assert_eq!(answer.status, 200);
}

#[test]
fn logs_requests_without_their_text() {
    let lines = Arc::new(Mutex::new(Vec::new()));
    let log = {
        let lines = lines.clone();
        Log::new(move |line| lines.lock().unwrap().push(line.to_owned()))
    };
    let router = router(hello(), Options { log, ..options() });
    let secret = "swordfish";
    post(
        &router,
        "/v1/completions",
        &json!({"prompt": secret, "stop": "swordfish2"}),
    );
    post(
        &router,
        "/v1/chat/completions",
        &json!({"messages": [{"role": "user", "content": secret}], "stream": true}),
    );
    post_text(
        &router,
        "/v1/completions",
        &format!("{{\"prompt\": \"a\", \"temperature\": \"{secret}\"}}"),
    );
    post_text(
        &router,
        "/tokenize",
        &format!("{{\"content\": \"{secret}\"}}"),
    );
    get(&router, &format!("/moe-hot-cache?json={secret}"));
    get(&router, &format!("/{secret}"));
    let lines = lines.lock().unwrap().join("\n");
    assert!(
        !lines.contains(secret) && !lines.contains("Hello"),
        "{lines}"
    );
    let without_times = lines.lines().map(|line| {
        let words: Vec<_> = line.split(' ').collect();
        words[..words.len() - 2].join(" ")
    });
    assert_eq!(
        without_times.collect::<Vec<_>>(),
        [
            "completions: finished, 10 prompt tokens, 4 generated tokens,",
            "POST /v1/completions 200",
            "POST /v1/chat/completions 200",
            "chat: finished, 17 prompt tokens, 4 generated tokens,",
            "POST /v1/completions 400",
            "POST /tokenize 200",
            "GET /moe-hot-cache 400",
            "GET - 404",
        ]
    );
}
