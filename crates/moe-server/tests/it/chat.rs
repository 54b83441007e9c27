//! `/v1/chat/completions`.

use serde_json::{Value, json};

use crate::client::{hello, post, post_text, rejected, service};

const PATH: &str = "/v1/chat/completions";

fn hi() -> Value {
    json!([{"role": "user", "content": "Hi"}])
}

#[test]
fn returns_a_message() {
    let backend = hello();
    let body = post(&service(&backend), PATH, &json!({"messages": hi()})).json();
    assert_eq!(body["object"], "chat.completion");
    let message = json!({"role": "assistant", "content": "Hello world!", "refusal": null});
    let choice = json!({"index": 0, "message": message, "logprobs": null, "finish_reason": "stop"});
    assert_eq!(body["choices"], json!([choice]));
    assert_eq!(body["usage"]["prompt_tokens"], 1 + "user: Hi\n".len());
    assert_eq!(backend.state().requests[0].n_predict, None);
}

#[test]
fn streams_a_message() {
    let backend = hello();
    let body = json!({"messages": hi(), "stream": true, "stream_options": {"include_usage": true}});
    let answer = post(&service(&backend), PATH, &body);
    assert!(answer.text.ends_with("data: [DONE]\n\n"));
    let events = answer.events();
    let deltas: Vec<_> = events
        .iter()
        .map(|event| event["choices"][0]["delta"].clone())
        .collect();
    let content = |text| json!({"content": text});
    assert_eq!(deltas[0], json!({"role": "assistant", "content": ""}));
    assert_eq!(deltas[1..5], ["Hello", " wor", "ld", "!"].map(content));
    assert_eq!(deltas[5], json!({}));
    assert_eq!(events[5]["choices"][0]["finish_reason"], "stop");
    assert_eq!(events[6]["usage"]["completion_tokens"], 4);
    assert_eq!(events.len(), 7);
}

#[test]
fn passes_messages_and_tools_to_the_template() {
    let backend = hello();
    let router = service(&backend);
    let call = json!({"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}});
    let tool = json!({"type": "function", "function": {"name": "f"}});
    let parts = json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]);
    let mut body = json!({
        "messages": [
            {"role": "system", "content": parts},
            {"role": "assistant", "content": null, "tool_calls": [call]},
            {"role": "tool", "content": "x", "tool_call_id": "1", "other": 1},
        ],
        "tools": [tool],
    });
    post(&router, PATH, &body);
    body["tool_choice"] = "none".into();
    post(&router, PATH, &body);
    let state = backend.state();
    assert_eq!(
        state.chats[0].messages,
        [
            json!({"role": "system", "content": "ab"}),
            json!({"role": "assistant", "content": null, "tool_calls": [call]}),
            json!({"role": "tool", "content": "x", "tool_call_id": "1"}),
        ]
    );
    assert_eq!(state.chats[0].tools, [tool]);
    assert!(state.chats[1].tools.is_empty());
}

#[test]
fn limits_tokens_by_either_name() {
    for (keys, n_predict) in [
        (json!({"max_tokens": 3}), 3),
        (json!({"max_completion_tokens": 2}), 2),
        (json!({"max_tokens": 3, "max_completion_tokens": 2}), 2),
    ] {
        let backend = hello();
        let mut body = keys.clone();
        body["messages"] = hi();
        let answer = post(&service(&backend), PATH, &body).json();
        assert_eq!(answer["choices"][0]["finish_reason"], "length");
        assert_eq!(
            backend.state().requests[0].n_predict,
            Some(n_predict),
            "{keys}"
        );
    }
}

#[test]
fn reports_log_probabilities() {
    let backend = hello();
    let mut body = json!({"messages": hi(), "logprobs": true, "top_logprobs": 3, "max_tokens": 1});
    let answer = post(&service(&backend), PATH, &body).json();
    let hello = json!({"token": "Hello", "bytes": b"Hello", "logprob": -0.25});
    let mut entry = hello.clone();
    entry["top_logprobs"] = json!([
        hello,
        {"token": "b", "bytes": [98], "logprob": -9999.0},
        {"token": "\u{fffd}", "bytes": [240], "logprob": -9.0},
    ]);
    assert_eq!(
        answer["choices"][0]["logprobs"],
        json!({"content": [entry], "refusal": null})
    );

    body["stream"] = true.into();
    let events = post(&service(&backend), PATH, &body).events();
    assert_eq!(
        events[1]["choices"][0]["logprobs"]["content"],
        json!([entry])
    );
    assert_eq!(events[2]["choices"][0]["logprobs"], Value::Null);
}

#[test]
fn rejects_wrong_bodies() {
    let backend = hello();
    let router = service(&backend);
    let image = json!([{"type": "image_url", "image_url": {"url": "x"}}]);
    for (body, param) in [
        (json!({}), Value::Null),
        (json!({"messages": []}), json!("messages")),
        (json!({"messages": "Hi"}), json!("messages")),
        (
            json!({"messages": [{"content": "Hi"}]}),
            json!("messages[0]"),
        ),
        (
            json!({"messages": [{"role": "user", "content": 1}]}),
            json!("messages[0].content"),
        ),
        (
            json!({"messages": [{"role": "user", "content": image}]}),
            json!("messages[0].content"),
        ),
        (json!({"messages": hi(), "n": 2}), json!("n")),
        (
            json!({"messages": hi(), "top_logprobs": 2}),
            json!("top_logprobs"),
        ),
        (
            json!({"messages": hi(), "logprobs": true, "top_logprobs": 21}),
            json!("top_logprobs"),
        ),
        (json!({"messages": hi(), "logprobs": 1}), json!("logprobs")),
        (
            json!({"messages": hi(), "max_completion_tokens": 0}),
            json!("max_completion_tokens"),
        ),
        (
            json!({"messages": hi(), "tool_choice": "required"}),
            json!("tool_choice"),
        ),
        (json!({"messages": hi(), "tools": "f"}), json!("tools")),
        (
            json!({"messages": hi(), "response_format": {"type": "json_object"}}),
            json!("response_format"),
        ),
    ] {
        let (message, found) = rejected(&router, PATH, &body);
        assert_eq!(found, param, "{body}: {message}");
    }
    assert!(backend.state().requests.is_empty());
}

#[test]
fn reports_errors_of_the_template() {
    let body = json!({"messages": [{"role": "critic", "content": ""}]});
    let answer = post_text(&service(&hello()), PATH, &body.to_string());
    assert_eq!(answer.status, 400);
    let expected = (
        "messages: the template has no role critic".to_owned(),
        json!("messages"),
    );
    assert_eq!(answer.error(), expected);
}
