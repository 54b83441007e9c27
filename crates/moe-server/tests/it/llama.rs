//! `/completion`, `/tokenize` and `/detokenize`.

use std::sync::Arc;

use serde_json::{Value, json};

use crate::client::{hello, post, rejected, service};
use crate::fake::{BOS, Fake};

const PATH: &str = "/completion";

#[test]
fn returns_the_fields_of_llama_server() {
    let backend = hello();
    let body = post(&service(&backend), PATH, &json!({"prompt": "ab"})).json();
    assert_eq!(body["content"], "Hello world!");
    assert_eq!(body["tokens"], json!([]));
    assert_eq!(
        (&body["stop"], &body["stop_type"]),
        (&json!(true), &json!("eos"))
    );
    assert_eq!(
        (&body["tokens_predicted"], &body["tokens_evaluated"]),
        (&json!(4), &json!(3))
    );
    assert_eq!(body["model"], "fake/model");
    let timings = &body["timings"];
    assert_eq!(
        (&timings["prompt_ms"], &timings["predicted_ms"]),
        (&json!(20.0), &json!(40.0))
    );
    assert_eq!(
        (
            &timings["prompt_per_second"],
            &timings["predicted_per_token_ms"]
        ),
        (&json!(150.0), &json!(10.0))
    );
}

#[test]
fn uses_defaults_of_llama_server() {
    let backend = hello();
    let router = service(&backend);
    post(&router, PATH, &json!({"prompt": "ab"}));
    post(
        &router,
        PATH,
        &json!({"prompt": [7], "n_predict": -1, "top_k": -1, "n_probs": 0}),
    );
    post(
        &router,
        PATH,
        &json!({"prompt": [7], "n_predict": 2, "seed": 3, "ignore_eos": true}),
    );
    for seed in [json!(-2), json!(u64::MAX), json!(-1)] {
        post(&router, PATH, &json!({"prompt": [7], "seed": seed}));
    }
    let requests = backend.state().requests.clone();
    let sampling = requests[0].sampling;
    assert_eq!((sampling.temperature, sampling.top_k), (0.8, 40));
    assert_eq!((sampling.top_p, sampling.min_p), (0.95, 0.05));
    assert_eq!((requests[0].n_predict, requests[0].n_probs), (None, None));
    assert_eq!(
        (requests[1].n_predict, requests[1].sampling.top_k),
        (None, 0)
    );
    assert_eq!(
        (requests[2].n_predict, requests[2].sampling.seed),
        (Some(2), 3)
    );
    assert!(requests[2].ignore_eos);
    // The low 64 bits of the seed count.
    let seeds = [3, 4, 5].map(|index| requests[index].sampling.seed);
    assert_eq!(seeds[..2], [u64::MAX - 1, u64::MAX]);
    assert_ne!(seeds[2], u64::MAX);
}

#[test]
fn uses_max_tokens_without_n_predict() {
    let backend = hello();
    let router = service(&backend);
    for (keys, expected) in [
        (json!({"max_tokens": 3}), Some(3)),
        (json!({"max_tokens": 3.0, "n_predict": null}), Some(3)),
        (json!({"max_tokens": 3, "n_predict": 5}), Some(5)),
        (json!({"max_tokens": 3, "n_predict": -1}), None),
        (json!({"max_tokens": -1}), None),
        (json!({"max_tokens": null}), None),
    ] {
        let mut body = keys.clone();
        body["prompt"] = json!([7]);
        post(&router, PATH, &body);
        let requests = backend.state().requests.clone();
        assert_eq!(requests.last().unwrap().n_predict, expected, "{keys}");
    }
}

#[test]
fn reports_why_the_text_ended() {
    let router = service(&hello());
    let body = post(&router, PATH, &json!({"prompt": "a", "stop": ["ld"]})).json();
    assert_eq!(
        (&body["content"], &body["stop_type"]),
        (&json!("Hello wor"), &json!("word"))
    );
    assert_eq!(body["stopping_word"], "ld");
    let body = post(
        &router,
        PATH,
        &json!({"prompt": "a", "n_predict": 1, "return_tokens": true}),
    );
    let body = body.json();
    assert_eq!(
        (&body["stop_type"], &body["tokens"]),
        (&json!("limit"), &json!([258]))
    );
}

#[test]
fn streams_parts() {
    let answer = post(
        &service(&hello()),
        PATH,
        &json!({"prompt": "ab", "stream": true}),
    );
    let events = answer.events();
    let parts: Vec<_> = events
        .iter()
        .map(|event| (&event["content"], &event["tokens"], &event["stop"]))
        .collect();
    let part = |text: &str, tokens: Value, stop: bool| (json!(text), tokens, json!(stop));
    let expected = [
        part("Hello", json!([258]), false),
        part(" wor", json!([259]), false),
        part("ld", json!([260]), false),
        part("!", json!([261]), false),
        part("", json!([]), true),
    ];
    assert_eq!(
        parts,
        expected
            .each_ref()
            .map(|(text, tokens, stop)| (text, tokens, stop))
    );
    assert!(!answer.text.contains("[DONE]"));
}

#[test]
fn reports_probabilities() {
    let body = json!({"prompt": "ab", "n_probs": 1, "n_predict": 1});
    let body = post(&service(&hello()), PATH, &body).json();
    let token = json!({"id": 258, "token": "Hello", "bytes": b"Hello", "logprob": -0.25});
    let mut entry = token.clone();
    entry["top_logprobs"] = json!([token]);
    assert_eq!(body["completion_probabilities"], json!([entry]));
}

#[test]
fn accepts_a_list_of_one_prompt() {
    for prompt in [json!("ab"), json!(["ab"]), json!([[256, 97, 98]])] {
        let backend = hello();
        let answer = post(&service(&backend), PATH, &json!({"prompt": prompt})).json();
        assert_eq!(answer["content"], "Hello world!");
        assert_eq!(backend.state().requests[0].prompt, [BOS, 97, 98]);
    }
}

#[test]
fn rejects_keys_that_would_change_the_text() {
    let router = service(&hello());
    for (key, neutral, used) in [
        ("repeat_penalty", json!(1), json!(1.1)),
        ("presence_penalty", json!(0.0), json!(0.5)),
        ("dry_multiplier", json!(0), json!(0.8)),
        ("xtc_probability", json!(0), json!(0.5)),
        ("typical_p", json!(1.0), json!(0.9)),
        ("top_n_sigma", json!(-1), json!(1)),
        ("dynatemp_range", json!(0), json!(1)),
        ("mirostat", json!(0), json!(2)),
        ("logit_bias", json!([]), json!([[5, -1]])),
        ("grammar", json!(""), json!("root ::= \"a\"")),
        ("json_schema", json!({}), json!({"type": "object"})),
        (
            "response_format",
            json!({"type": "text"}),
            json!({"type": "json_object"}),
        ),
        ("lora", json!([]), json!([{"id": 0, "scale": 1}])),
        ("n", json!(1), json!(2)),
        ("echo", json!(false), json!(true)),
    ] {
        for path in ["/completion", "/v1/completions"] {
            for accepted in [&neutral, &json!(null)] {
                let answer = post(&router, path, &json!({"prompt": "a", key: accepted}));
                assert_eq!(answer.status, 200, "{path}: {key}");
            }
            let (_, param) = rejected(&router, path, &json!({"prompt": "a", key: used}));
            assert_eq!(param, key, "{path}");
        }
    }
}

#[test]
fn rejects_wrong_bodies() {
    let router = service(&hello());
    for (body, param) in [
        (json!({}), Value::Null),
        (json!({"prompt": ["a", "b"]}), json!("prompt")),
        (json!({"prompt": [[1], [2]]}), json!("prompt")),
        (json!({"prompt": ""}), json!("prompt")),
        (json!({"prompt": []}), json!("prompt")),
        (json!({"prompt": [""]}), json!("prompt")),
        (json!({"prompt": [[]]}), json!("prompt")),
        (
            json!({"prompt": "a", "n_predict": "many"}),
            json!("n_predict"),
        ),
        (json!({"prompt": "a", "n_probs": 21}), json!("n_probs")),
        (
            json!({"prompt": "a", "return_tokens": 1}),
            json!("return_tokens"),
        ),
    ] {
        let (message, found) = rejected(&router, PATH, &body);
        assert_eq!(found, param, "{body}: {message}");
    }
}

#[test]
fn tokenizes() {
    let router = service(&hello());
    for (body, tokens) in [
        (json!({"content": ""}), json!([])),
        (json!({"content": "a<s>"}), json!([97, BOS])),
        (
            json!({"content": "a", "add_special": true}),
            json!([BOS, 97]),
        ),
        (
            json!({"content": "<s>", "parse_special": false}),
            json!([60, 115, 62]),
        ),
        (
            json!({"content": "é", "with_pieces": true}),
            json!([{"id": 195, "piece": [195]}, {"id": 169, "piece": [169]}]),
        ),
        (
            json!({"content": "a", "with_pieces": true}),
            json!([{"id": 97, "piece": "a"}]),
        ),
    ] {
        assert_eq!(
            post(&router, "/tokenize", &body).json()["tokens"],
            tokens,
            "{body}"
        );
    }
    assert_eq!(
        rejected(&router, "/tokenize", &json!({"content": 1})).1,
        "content"
    );
    // A list is not an object with these values.
    rejected(&router, "/tokenize", &json!(["a", null, null, null]));
}

#[test]
fn detokenizes() {
    let backend = Arc::new(Fake::new(&["é".as_bytes()], 1));
    let router = service(&backend);
    for (tokens, content) in [
        (json!([]), "".to_owned()),
        (json!([258, 97, 195, 169]), "éaé".to_owned()),
        (json!([97.0, 98]), "ab".to_owned()),
        (json!([195]), "\u{fffd}".to_owned()),
    ] {
        let answer = post(&router, "/detokenize", &json!({"tokens": tokens}));
        assert_eq!(answer.json()["content"], content);
    }
    let answer = post(&router, "/detokenize", &json!({"tokens": [259]}));
    assert_eq!(answer.status, 400);
    let message =
        "tokens[0]: 259 is out of range (0..=258); use token ids of this model's vocabulary";
    assert_eq!(answer.error(), (message.into(), json!("tokens[0]")));
    assert_eq!(
        rejected(&router, "/detokenize", &json!({"tokens": [-1]})).1,
        "tokens[0]"
    );
}
