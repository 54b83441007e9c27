//! `GET /` and `GET /ui/state`.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::Request;
use moe_server::http::{ApiKey, Log, Options, Ui, router};
use moe_server::recent::RecentRequest;
use serde_json::json;

use crate::client::{Answer, get, hello, options, send, service};
use crate::fake::{FIRST, Fake};

const PAGE: &str = "<!doctype html><title>page</title>";

/// A server with a page, and two recent requests. Request 3 has tokens, as if they were kept.
fn server(options: Options, shows_text: bool) -> Router {
    let mut backend = Fake::new(&[b" Paris"], 2);
    backend.recent = vec![
        RecentRequest {
            id: 3,
            n_prompt: 2,
            n_generated: 1,
            time: Duration::from_millis(1500),
            tokens: vec![u32::from(b'h'), u32::from(b'i'), FIRST],
            selections: [(0, vec![0, 2]), (5, vec![1])].into(),
            ..RecentRequest::default()
        },
        RecentRequest {
            id: 2,
            outcome: Some("length"),
            queue_time: Duration::from_millis(250),
            ..RecentRequest::default()
        },
    ];
    let options = Options {
        ui: Some(Ui::new(PAGE, shows_text)),
        ..options
    };
    router(Arc::new(backend), options)
}

#[test]
fn serves_the_page() {
    let answer = get(&server(options(), false), "/");
    assert_eq!((answer.status, answer.text.as_str()), (200, PAGE));
    assert_eq!(answer.headers["content-type"], "text/html; charset=utf-8");
    let policy = &answer.headers["content-security-policy"];
    assert_eq!(policy, "frame-ancestors 'none'");
}

#[test]
fn reports_the_state_and_recent_requests() {
    let state = get(&server(options(), false), "/ui/state").json();
    assert_eq!(state["schema"], "moe-analyze.live.v1");
    assert_eq!(state["n_slots"], 2);
    let lanes = json!([
        {"name": "hot0", "tier": "gpu", "selections": 3},
        {"name": "hot1", "tier": "gpu", "selections": 0},
        {"name": "cold", "tier": "ram", "selections": 1},
    ]);
    assert_eq!(state["lanes"], lanes);
    let requests = json!([
        {
            "id": 3, "outcome": null, "n_prompt": 2, "n_generated": 1,
            "queue_seconds": 0.0, "seconds": 1.5,
        },
        {
            "id": 2, "outcome": "length", "n_prompt": 0, "n_generated": 0,
            "queue_seconds": 0.25, "seconds": 0.0,
        },
    ]);
    assert_eq!(state["requests"], requests);
    assert_eq!(state["selected"], json!(null));
}

#[test]
fn reports_the_experts_of_a_request() {
    let router = server(options(), false);
    let state = get(&router, "/ui/state?request=3").json();
    let layers = json!([
        {"layer": 0, "selections": [0, 2]},
        {"layer": 5, "selections": [1]},
    ]);
    assert_eq!(state["selected"], json!({"id": 3, "layers": layers}));
    let state = get(&router, "/ui/state?request=9").json();
    assert_eq!(state["selected"], json!(null));
    assert_eq!(get(&router, "/ui/state?request=x").status, 400);
}

#[test]
fn text_is_reported_on_request_only() {
    for shows_text in [false, true] {
        let router = server(options(), shows_text);
        let answer = get(&router, "/ui/state?request=3");
        assert_eq!(answer.text.contains("Paris"), shows_text);
        if shows_text {
            let selected = &answer.json()["selected"];
            assert_eq!(selected["prompt"], "hi");
            assert_eq!(selected["answer"], " Paris");
        }
    }
}

#[test]
fn page_needs_no_key_but_its_data_does() {
    let with_key = || Options {
        api_key: ApiKey::new("secret"),
        ..options()
    };
    let router = server(with_key(), false);
    assert_eq!(get(&router, "/").status, 200);
    assert_eq!(get(&router, "/ui/state").status, 401);
    let request = Request::get("/ui/state").header("authorization", "Bearer secret");
    assert_eq!(
        send(&router, request.body(Body::empty()).unwrap()).status,
        200
    );
    // Without a key, web pages of other sites cannot read the state.
    let router = server(options(), false);
    for path in ["/", "/ui/state"] {
        let request = Request::get(path).header("host", "example.org");
        let answer: Answer = send(&router, request.body(Body::empty()).unwrap());
        assert_eq!(answer.status, 403, "{path}");
    }
}

#[test]
fn server_without_page_has_no_data_either() {
    let router = service(&hello());
    for path in ["/", "/ui/state"] {
        assert_eq!(get(&router, path).status, 404, "{path}");
    }
}

#[test]
fn polls_are_not_logged() {
    let lines = Arc::new(Mutex::new(Vec::new()));
    let written = Arc::clone(&lines);
    let log = Log::new(move |line| written.lock().unwrap().push(line.to_owned()));
    let router = server(Options { log, ..options() }, true);
    for path in ["/ui/state?request=3", "/ui/state?request=x", "/"] {
        get(&router, path);
    }
    let lines = lines.lock().unwrap();
    assert_eq!(lines.len(), 2, "{lines:?}");
    assert!(lines[0].starts_with("GET /ui/state 400 "), "{lines:?}");
    assert!(lines[1].starts_with("GET / 200 "), "{lines:?}");
}
