//! `/v1/completions` and `/v1/models`.

use std::sync::Arc;

use moe_server::generation::GenerationRequest;
use serde_json::{Value, json};

use crate::client::{get, hello, post, post_text, rejected, service};
use crate::fake::{BOS, FIRST, Fake};

const PATH: &str = "/v1/completions";

#[test]
fn returns_text_and_usage() {
    let backend = hello();
    let answer = post(
        &service(&backend),
        PATH,
        &json!({"prompt": "ab", "model": "any"}),
    );
    assert_eq!(answer.status, 200);
    let body = answer.json();
    assert_eq!(body["object"], "text_completion");
    assert_eq!(body["model"], "fake/model");
    let choice =
        json!({"text": "Hello world!", "index": 0, "logprobs": null, "finish_reason": "stop"});
    assert_eq!(body["choices"], json!([choice]));
    let usage = json!({"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7});
    assert_eq!(body["usage"], usage);
}

#[test]
fn uses_defaults_of_openai() {
    let backend = hello();
    post(&service(&backend), PATH, &json!({"prompt": "ab"}));
    let request = backend.state().requests[0].clone();
    assert_eq!(request.prompt, [BOS, 97, 98]);
    assert_eq!(
        (request.n_predict, request.n_probs, request.ignore_eos),
        (Some(16), None, false)
    );
    let sampling = request.sampling;
    assert_eq!((sampling.temperature, sampling.top_p), (1.0, 1.0));
    assert_eq!((sampling.top_k, sampling.min_p), (0, 0.0));
    assert!(request.deadline.is_some());
    // Without a seed, each request has another one.
    post(
        &service(&backend),
        PATH,
        &json!({"prompt": "ab", "seed": -1}),
    );
    assert_ne!(backend.state().requests[1].sampling.seed, sampling.seed);
}

#[test]
fn passes_parameters_to_the_scheduler() {
    let backend = hello();
    let body = json!({
        "prompt": [5, 6], "max_tokens": 3, "temperature": 0.5, "top_p": 0.25, "min_p": 0.125,
        "top_k": 7, "seed": 42, "logprobs": 2, "ignore_eos": true, "n": 1, "best_of": 1,
        "presence_penalty": 0, "echo": false, "unknown": {"key": 1},
    });
    let answer = post(&service(&backend), PATH, &body);
    assert_eq!(answer.json()["choices"][0]["finish_reason"], "length");
    let request: GenerationRequest = backend.state().requests[0].clone();
    assert_eq!((request.prompt, request.n_predict), (vec![5, 6], Some(3)));
    assert_eq!((request.n_probs, request.ignore_eos), (Some(2), true));
    let sampling = request.sampling;
    assert_eq!(
        (sampling.temperature, sampling.top_p, sampling.min_p),
        (0.5, 0.25, 0.125)
    );
    assert_eq!((sampling.top_k, sampling.seed), (7, 42));
}

/// JSON Schema has no other integers.
#[test]
fn accepts_integers_with_a_fraction_of_zero() {
    let backend = hello();
    let body = json!({
        "prompt": [5.0, 6], "max_tokens": 3.0, "top_k": 7.0, "seed": 42.0, "logprobs": 2.0, "n": 1.0,
        "best_of": 1.0,
    });
    assert_eq!(post(&service(&backend), PATH, &body).status, 200);
    let request = backend.state().requests[0].clone();
    assert_eq!((request.prompt, request.n_predict), (vec![5, 6], Some(3)));
    assert_eq!(request.n_probs, Some(2));
    assert_eq!((request.sampling.top_k, request.sampling.seed), (7, 42));
}

#[test]
fn large_limits_mean_no_limit() {
    let backend = hello();
    let router = service(&backend);
    for large in ["18446744073709551615", "18446744073709551616", "1e300"] {
        let body = format!("{{\"prompt\": \"a\", \"max_tokens\": {large}, \"top_k\": {large}}}");
        let body = serde_json::from_str(&body).unwrap();
        assert_eq!(post(&router, PATH, &body).status, 200, "{large}");
        let request = backend.state().requests.pop().unwrap();
        assert_eq!(request.n_predict, Some(usize::MAX), "{large}");
        assert_eq!(request.sampling.top_k, usize::MAX, "{large}");
    }
}

#[test]
fn null_means_the_default() {
    let backend = hello();
    let mut body = json!({"prompt": "a"});
    for key in [
        "max_tokens",
        "temperature",
        "top_p",
        "min_p",
        "top_k",
        "seed",
        "stop",
        "stream",
        "logprobs",
        "n",
        "echo",
        "suffix",
        "best_of",
        "logit_bias",
        "stream_options",
        "ignore_eos",
    ] {
        body[key] = Value::Null;
    }
    assert_eq!(post(&service(&backend), PATH, &body).status, 200);
    assert_eq!(backend.state().requests[0].n_predict, Some(16));
}

#[test]
fn answers_several_prompts_with_several_choices() {
    for prompt in [json!(["a", "bcd"]), json!([[1], [2, 3, 4]])] {
        let backend = hello();
        let body = json!({"prompt": prompt, "max_tokens": 2});
        let answer = post(&service(&backend), PATH, &body).json();
        let choices = answer["choices"].as_array().unwrap();
        for (index, choice) in choices.iter().enumerate() {
            assert_eq!(
                (&choice["index"], &choice["text"]),
                (&json!(index), &json!("Hello wor"))
            );
        }
        assert_eq!(choices.len(), 2);
        assert_eq!(answer["usage"]["completion_tokens"], 4);

        let body = json!({"prompt": prompt, "max_tokens": 2, "stream": true});
        let events = post(&service(&backend), PATH, &body).events();
        for index in 0..2 {
            assert_eq!(text_of(&events, index), "Hello wor");
        }
    }
}

/// The text of a choice in the events of a stream.
fn text_of(events: &[Value], index: usize) -> String {
    let choices = events
        .iter()
        .flat_map(|event| event["choices"].as_array().unwrap());
    let choices = choices.filter(|choice| choice["index"] == json!(index));
    choices
        .map(|choice| choice["text"].as_str().unwrap())
        .collect()
}

#[test]
fn streams_text_in_events() {
    let backend = hello();
    let answer = post(
        &service(&backend),
        PATH,
        &json!({"prompt": "ab", "stream": true}),
    );
    assert_eq!(answer.headers["content-type"], "text/event-stream");
    assert!(answer.text.ends_with("data: [DONE]\n\n"));
    let events = answer.events();
    let texts: Vec<_> = events
        .iter()
        .map(|event| &event["choices"][0]["text"])
        .collect();
    assert_eq!(texts, ["Hello", " wor", "ld", "!", ""]);
    let reasons: Vec<_> = events
        .iter()
        .map(|event| &event["choices"][0]["finish_reason"])
        .collect();
    assert_eq!(
        reasons,
        [
            &Value::Null,
            &Value::Null,
            &Value::Null,
            &Value::Null,
            &json!("stop")
        ]
    );
    assert!(events.iter().all(|event| event["id"] == events[0]["id"]));
    assert!(events.iter().all(|event| event.get("usage").is_none()));
}

#[test]
fn streams_usage_on_request() {
    let backend = hello();
    let body = json!({"prompt": "ab", "stream": true, "stream_options": {"include_usage": true}});
    let mut events = post(&service(&backend), PATH, &body).events();
    let last = events.pop().unwrap();
    assert_eq!(last["choices"], json!([]));
    assert_eq!(last["usage"]["total_tokens"], 7);
    assert!(
        events
            .iter()
            .all(|event| event["usage"].is_null() && event.get("usage").is_some())
    );
}

#[test]
fn ends_before_a_stop_sequence() {
    for (stop, text) in [
        (json!("o"), "Hell"),
        (json!(["xx", "o w"]), "Hell"),
        (json!("world"), "Hello "),
        (json!("!"), "Hello world"),
        (json!([]), "Hello world!"),
        (json!(""), "Hello world!"),
        (json!("!!"), "Hello world!"),
    ] {
        let backend = hello();
        let mut body = json!({"prompt": "ab", "stop": stop});
        let choice = post(&service(&backend), PATH, &body).json()["choices"][0].clone();
        assert_eq!(
            (&choice["text"], &choice["finish_reason"]),
            (&json!(text), &json!("stop"))
        );
        body["stream"] = true.into();
        let events = post(&service(&backend), PATH, &body).events();
        assert_eq!(text_of(&events, 0), text, "{stop}");
    }
}

#[test]
fn counts_tokens_up_to_a_stop_sequence_and_cancels_the_request() {
    let backend = hello();
    // Otherwise all 4,000 tokens can be generated before the first is read.
    backend.allow(Some(2));
    let body = json!({"prompt": "ab", "stop": "o w", "ignore_eos": true, "max_tokens": 4000});
    let answer = post(&service(&backend), PATH, &body).json();
    assert_eq!(answer["usage"]["completion_tokens"], 2);
    backend.wait_until(|state| state.n_cancelled == 1);
}

#[test]
fn does_not_split_characters() {
    let backend = Arc::new(Fake::new(
        &[b"\xf0\x9f", b"\x8c", b"\x8d!", b"\xff", b"\xc3"],
        1,
    ));
    let answer = post(
        &service(&backend),
        PATH,
        &json!({"prompt": "a", "stream": true}),
    );
    let events = answer.events();
    let texts: Vec<_> = events
        .iter()
        .map(|event| &event["choices"][0]["text"])
        .collect();
    assert_eq!(texts, ["🌍!", "\u{fffd}", "\u{fffd}", ""]);
}

#[test]
fn reports_log_probabilities() {
    let backend = Arc::new(Fake::new(&[b"H", "é".as_bytes(), b"llo"], 1));
    let body = json!({"prompt": "a", "logprobs": 2});
    let logprobs = post(&service(&backend), PATH, &body).json()["choices"][0]["logprobs"].clone();
    assert_eq!(
        logprobs,
        json!({
            "tokens": ["H", "é", "llo"],
            "token_logprobs": [-0.25, -0.25, -0.25],
            "top_logprobs": [{"H": -0.25, "b": -9999.0}, {"é": -0.25, "b": -9999.0}, {"llo": -0.25, "b": -9999.0}],
            "text_offset": [0, 1, 2],
        })
    );
    let body = json!({"prompt": "a", "logprobs": 0});
    let logprobs = post(&service(&backend), PATH, &body).json()["choices"][0]["logprobs"].clone();
    assert_eq!(logprobs["top_logprobs"], json!([{}, {}, {}]));
}

/// Tokens are reported with the text in which they start; tokens of a stop sequence are not reported.
#[test]
fn reports_log_probabilities_of_the_text_only() {
    let backend = Arc::new(Fake::new(&[b"one ", b"<e", b"n", b"<en", b"d>", b"x"], 1));
    let body = json!({"prompt": "a", "stop": "<end>", "logprobs": 0, "stream": true});
    let events = post(&service(&backend), PATH, &body).events();
    let choices: Vec<_> = events.iter().map(|event| &event["choices"][0]).collect();
    let parts: Vec<_> = choices
        .iter()
        .map(|choice| (&choice["text"], &choice["logprobs"]["tokens"]))
        .collect();
    assert_eq!(
        parts,
        [
            (&json!("one "), &json!(["one "])),
            (&json!("<en"), &json!(["<e", "n"])),
            (&json!(""), &Value::Null),
        ]
    );
    assert_eq!(choices[1]["logprobs"]["text_offset"], json!([4, 6]));
}

#[test]
fn rejects_wrong_bodies() {
    let backend = hello();
    let router = service(&backend);
    for (body, param) in [
        (json!({}), Value::Null),
        (json!({"prompt": 3}), json!("prompt")),
        (json!({"prompt": null}), json!("prompt")),
        (json!({"prompt": ""}), json!("prompt")),
        (json!({"prompt": []}), json!("prompt")),
        (json!({"prompt": [[]]}), json!("prompt")),
        (json!({"prompt": ["a", ""]}), json!("prompt")),
        (json!({"prompt": [[1], []]}), json!("prompt")),
        (json!({"prompt": [0.5]}), json!("prompt")),
        (json!({"prompt": [4_294_967_296_u64]}), json!("prompt")),
        (json!({"prompt": ["a", 1]}), json!("prompt")),
        (json!({"prompt": [-1]}), json!("prompt")),
        (json!({"prompt": "a", "n": 2}), json!("n")),
        (json!({"prompt": "a", "max_tokens": 0}), json!("max_tokens")),
        (
            json!({"prompt": "a", "max_tokens": "1"}),
            json!("max_tokens"),
        ),
        (
            json!({"prompt": "a", "max_tokens": 1.5}),
            json!("max_tokens"),
        ),
        (
            json!({"prompt": "a", "temperature": -1}),
            json!("temperature"),
        ),
        (
            json!({"prompt": "a", "temperature": "hot"}),
            json!("temperature"),
        ),
        (
            json!({"prompt": "a", "temperature": 1e39}),
            json!("temperature"),
        ),
        (json!({"prompt": "a", "top_p": 1.5}), json!("top_p")),
        (json!({"prompt": "a", "min_p": 2}), json!("min_p")),
        (json!({"prompt": "a", "seed": 0.5}), json!("seed")),
        (json!({"prompt": "a", "logprobs": 21}), json!("logprobs")),
        (json!({"prompt": "a", "logprobs": true}), json!("logprobs")),
        (json!({"prompt": "a", "stream": 1}), json!("stream")),
        (json!({"prompt": "a", "stop": 1}), json!("stop")),
        (json!({"prompt": "a", "stop": vec!["a"; 17]}), json!("stop")),
        (json!({"prompt": "a", "echo": true}), json!("echo")),
        (json!({"prompt": "a", "suffix": "b"}), json!("suffix")),
        (json!({"prompt": "a", "best_of": 2}), json!("best_of")),
        (
            json!({"prompt": "a", "presence_penalty": 1}),
            json!("presence_penalty"),
        ),
        (
            json!({"prompt": "a", "frequency_penalty": 1}),
            json!("frequency_penalty"),
        ),
        (
            json!({"prompt": "a", "logit_bias": {"1": 2}}),
            json!("logit_bias"),
        ),
        (
            json!({"prompt": "a", "stream_options": {"include_usage": 1}}),
            json!("stream_options.include_usage"),
        ),
        (json!({"prompt": vec!["a"; 33]}), json!("prompt")),
    ] {
        let (message, found) = rejected(&router, PATH, &body);
        assert_eq!(found, param, "{body}: {message}");
    }
    assert!(backend.state().requests.is_empty());
}

#[test]
fn rejects_prompts_that_the_scheduler_rejects() {
    let backend = hello();
    let router = service(&backend);
    let body = json!({"prompt": "a".repeat(5000)});
    let answer = post(&router, PATH, &body);
    assert_eq!(answer.status, 400);
    assert_eq!(answer.json()["error"]["code"], "context_length_exceeded");
    assert!(answer.error().0.contains("5001 tokens"));
    let answer = post(&router, PATH, &json!({"prompt": [FIRST + 4]}));
    assert_eq!(answer.status, 400);
    assert!(
        answer.error().0.contains(
            "token 262 is out of range (0..=261); use token ids of this model's vocabulary"
        )
    );
}

#[test]
fn rejects_bodies_that_are_not_json() {
    let router = service(&hello());
    for body in [
        "",
        "{",
        "[]",
        "null",
        "{\"prompt\": \"a\"} x",
        "prompt=a",
        &"[".repeat(1000),
    ] {
        let answer = post_text(&router, PATH, body);
        assert_eq!(answer.status, 400, "{body}");
    }
}

#[test]
fn reports_failures_of_the_scheduler() {
    let mut backend = Fake::new(&[b"a"], 1);
    backend.failure = Some("the GPU failed");
    let router = service(&Arc::new(backend));
    let answer = post(&router, PATH, &json!({"prompt": "a"}));
    assert_eq!(
        (answer.status, answer.error().0),
        (500, "the GPU failed".into())
    );
    let answer = post(&router, PATH, &json!({"prompt": "a", "stream": true}));
    assert_eq!(answer.status, 200);
    let events = answer.events();
    assert_eq!(events[0]["choices"][0]["text"], "a");
    assert_eq!(events[1]["error"]["message"], "the GPU failed");
    assert_eq!(events.len(), 2);
}

#[test]
fn lists_the_model() {
    let router = service(&hello());
    let models = get(&router, "/v1/models").json();
    assert_eq!(models["data"][0]["id"], "fake/model");
    assert_eq!(
        get(&router, "/v1/models/fake/model").json(),
        models["data"][0]
    );
    assert_eq!(get(&router, "/v1/models/other").status, 404);
    assert_eq!(get(&router, "/v1/models/%ff").status, 400);
}
