//! Bodies and their description in `schemas/openapi.json`.

use std::collections::BTreeSet;
use std::fs;

use serde_json::{Value, json};

/// The OpenAPI description.
fn document() -> Value {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../schemas/openapi.json");
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

/// Method and path of all operations.
pub fn paths() -> Vec<String> {
    let document = document();
    let paths = document["paths"].as_object().unwrap().iter();
    let operations = paths.flat_map(|(path, operations)| {
        let methods = operations.as_object().unwrap().keys();
        methods.map(move |method| format!("{} {path}", method.to_uppercase()))
    });
    operations.collect()
}

/// The errors of `value` against a schema of the document.
fn errors(document: &Value, schema: &Value, value: &Value) -> Vec<String> {
    let mut schema = schema.clone();
    schema["components"] = document["components"].clone();
    let validator = jsonschema::validator_for(&schema).unwrap();
    validator
        .iter_errors(value)
        .map(|error| error.to_string())
        .collect()
}

/// The operation of a method and path of a request.
fn operation(document: &Value, method: &str, path: &str) -> Option<Value> {
    let path = path.split('?').next().unwrap();
    let path = if path.starts_with("/v1/models/") {
        "/v1/models/{model}"
    } else {
        path
    };
    let operation = &document["paths"][path][method.to_lowercase()];
    (!operation.is_null()).then(|| operation.clone())
}

/// Asserts that a response conforms to the description.
#[track_caller]
pub fn check_response(method: &str, path: &str, status: u16, content_type: &str, body: &str) {
    let document = document();
    let Some(operation) = operation(&document, method, path) else {
        let value = serde_json::from_str(body).unwrap();
        let schema = json!({"$ref": "#/components/schemas/Error"});
        assert_eq!(errors(&document, &schema, &value), [""; 0], "{body}");
        return;
    };
    let mut response = operation["responses"][status.to_string()].clone();
    assert!(
        !response.is_null(),
        "{method} {path} {status} is not described: {body}"
    );
    if let Some(reference) = response["$ref"].as_str() {
        response = document.pointer(&reference[1..]).unwrap().clone();
    }
    let media = &response["content"][content_type.split(';').next().unwrap()];
    assert!(
        !media.is_null(),
        "{method} {path} {status} {content_type} is not described"
    );
    match content_type {
        "application/json" => {
            let value = serde_json::from_str(body).unwrap();
            assert_eq!(
                errors(&document, &media["schema"], &value),
                [""; 0],
                "{body}"
            );
        }
        "text/event-stream" => {
            for event in events(body) {
                let is_error = event.get("error").is_some();
                let error = json!({"$ref": "#/components/schemas/Error"});
                let schema = if is_error { &error } else { &media["x-event"] };
                assert_eq!(errors(&document, schema, &event), [""; 0], "{event}");
            }
        }
        _ => {}
    }
}

/// Whether the body of a request conforms to the description.
pub fn is_valid_request(method: &str, path: &str, body: &Value) -> bool {
    let document = document();
    let operation = operation(&document, method, path).unwrap();
    let schema = &operation["requestBody"]["content"]["application/json"]["schema"];
    errors(&document, schema, body).is_empty()
}

/// The JSON data of the events of a stream.
pub fn events(body: &str) -> Vec<Value> {
    let data = body.lines().filter_map(|line| line.strip_prefix("data: "));
    data.filter(|data| *data != "[DONE]")
        .map(|data| serde_json::from_str(data).unwrap())
        .collect()
}

/// Every schema is valid and used, and every reference leads to something.
#[test]
fn references_are_complete() {
    let document = document();
    let mut used = BTreeSet::new();
    collect_references(&document, &mut used);
    for reference in &used {
        assert!(document.pointer(&reference[1..]).is_some(), "{reference}");
    }
    for kind in ["schemas", "responses"] {
        for (name, schema) in document["components"][kind].as_object().unwrap() {
            let reference = format!("#/components/{kind}/{name}");
            assert!(used.contains(&reference), "{reference} is not used");
            if kind == "schemas" {
                errors(&document, schema, &Value::Null);
            }
        }
    }
}

fn collect_references(value: &Value, found: &mut BTreeSet<String>) {
    if let Some(reference) = value.get("$ref").and_then(Value::as_str) {
        found.insert(reference.to_owned());
    }
    match value {
        Value::Array(items) => items
            .iter()
            .for_each(|item| collect_references(item, found)),
        Value::Object(items) => items
            .values()
            .for_each(|item| collect_references(item, found)),
        _ => {}
    }
}
