//! The examples of `docs/http-api.md`: a block `http` with a request, then a block with its response. `MOE_BLESS=1` renews the
//! responses.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::sync::Arc;

use axum::body::Body;
use axum::http::Request;
use serde_json::Value;

use crate::client::{get, post, send, service};
use crate::fake::Fake;
use crate::openapi::events;

const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/http-api.md");

#[test]
fn responses_are_those_of_the_page() {
    let page = fs::read_to_string(PAGE).unwrap();
    let renewed = renew(&page);
    if std::env::var_os("MOE_BLESS").is_some() {
        fs::write(PAGE, renewed).unwrap();
    } else {
        assert_eq!(page, renewed, "MOE_BLESS=1 renews the responses");
    }
}

/// The page with the responses to its requests.
fn renew(page: &str) -> String {
    let mut renewed = String::new();
    let mut response = None;
    let mut lines = page.lines();
    while let Some(line) = lines.next() {
        writeln!(renewed, "{line}").unwrap();
        if !line.starts_with("```") {
            continue;
        }
        let block: Vec<&str> = lines.by_ref().take_while(|line| *line != "```").collect();
        if line.starts_with("```console") {
            // Commands, which the tests of the program check.
            writeln!(renewed, "{}\n```", block.join("\n")).unwrap();
        } else if line == "```http" {
            assert!(response.is_none(), "a response is missing before {block:?}");
            response = Some(respond(&block));
            writeln!(renewed, "{}\n```", block.join("\n")).unwrap();
        } else {
            let response: String = response.take().expect("the request is missing");
            writeln!(renewed, "{response}\n```").unwrap();
        }
    }
    assert!(response.is_none(), "the last response is missing");
    renewed
}

/// The response to a request: method and path, an empty line, the body.
fn respond(request: &[&str]) -> String {
    let mut backend = Fake::new(&[b" Paris", b"."], 1);
    backend.model.name = "qwen3-30b-a3b".into();
    let (method, path) = request[0].split_once(' ').unwrap();
    let body = request.get(2..).unwrap_or_default().join("\n");
    let request = Request::builder().method(method).uri(path);
    let answer = send(
        &service(&Arc::new(backend)),
        request.body(Body::from(body)).unwrap(),
    );
    if answer.headers["content-type"] == "application/json" {
        return pretty(&fixed(&answer.json()), 0);
    }
    let events = events(&answer.text);
    let mut lines: Vec<_> = events
        .iter()
        .map(|event| format!("data: {}\n", fixed(event)))
        .collect();
    lines.push("data: [DONE]".into());
    lines.join("\n")
}

/// A response with the same ids and times in each run.
fn fixed(value: &Value) -> Value {
    let mut value = value.clone();
    if let Some(id) = value["id"].as_str() {
        let (kind, _) = id.split_once('-').unwrap();
        value["id"] = format!("{kind}-7d1f0c52a8e94b36").into();
        value["created"] = 1_700_000_000.into();
    }
    value
}

/// JSON in which lists and objects that fit into a line stay on it.
fn pretty(value: &Value, indent: usize) -> String {
    let line = value.to_string();
    let (open, items, close) = match value {
        Value::Object(items) if line.len() + indent > 100 => {
            let items = items.iter();
            let items =
                items.map(|(key, value)| format!("\"{key}\": {}", pretty(value, indent + 2)));
            ('{', items.collect::<Vec<_>>(), '}')
        }
        Value::Array(items) if line.len() + indent > 100 => {
            let items = items.iter().map(|value| pretty(value, indent + 2));
            ('[', items.collect(), ']')
        }
        _ => return line,
    };
    let space = " ".repeat(indent + 2);
    let items = items.iter().map(|item| format!("{space}{item}"));
    let items = items.collect::<Vec<_>>().join(",\n");
    format!("{open}\n{items}\n{}{close}", &space[2..])
}

/// The tables of the page contain all paths and all metrics, and no others.
#[test]
fn tables_are_complete() {
    let page = fs::read_to_string(PAGE).unwrap();
    let router = service(&Arc::new(Fake::new(&[b"a"], 1)));
    post(&router, "/completion", &serde_json::json!({"prompt": "a"}));
    let metrics = get(&router, "/metrics").text;
    let reported = metrics
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE "));
    let rows = page.lines().filter_map(|line| line.strip_prefix("| `moe_"));
    let described = rows.map(|row| {
        let mut cells = row.split(" | ");
        let name = cells.next().unwrap().trim_end_matches('`');
        format!("moe_{name} {}", cells.next().unwrap())
    });
    let reported: BTreeSet<String> = reported.map(str::to_owned).collect();
    assert_eq!(described.collect::<BTreeSet<_>>(), reported);
    for path in crate::openapi::paths() {
        let path = path.replace("{model}", "NAME");
        assert!(
            page.contains(&format!("{path}`")),
            "the page does not describe {path}"
        );
    }
}
