//! Templates compared with Python's jinja2, configured as in `transformers` (`tests/fixtures/chat/render.py`).

use std::collections::BTreeMap;
use std::fs;
use std::process::Command;

use moe_engine::chat::{ChatError, ChatTemplate, RenderOptions, SpecialTokens};
use serde_json::{Map, Value, json};
use time::macros::datetime;

/// Expressions whose result differs from jinja2's. `docs/limitations.md` lists them.
const DIFFERENCES: [&str; 10] = [
    "{% for x in none %}x{% endfor %}",
    "{{ 'a' < 1 }}",
    "{{ '%s-%d' % ('a', 3) }}",
    "{{ 1e20 ~ '' }}",
    "{{ [1e20] }}",
    "{{ data.items.type }}",
    "{{ [{'b': 3}] | map(attribute='a') | list }}",
    "{{ {'b': 1, 'A': 2} | dictsort(true) }}",
    "{% macro m(a, c=a) %}{{ c }}{% endmacro %}{{ m(1) }}",
    "{% macro m(a) %}{{ kwargs }}{{ varargs }}{% endmacro %}{{ m(1, 2, x=3) }}",
];

fn fixture(name: &str) -> String {
    let dir = "crates/moe-engine/tests/fixtures/chat";
    let path = moe_testkit::repository(dir).join(name);
    if name.ends_with(".zst") {
        return String::from_utf8(moe_testkit::reference::decompressed(&path)).unwrap();
    }
    fs::read_to_string(path).unwrap()
}

fn json_of(name: &str) -> Value {
    serde_json::from_str(&fixture(name)).unwrap()
}

/// The result in the format of `render.py`.
fn render(source: &str, conversation: &Value, variables: &[(&str, Value)]) -> (Value, String) {
    let own = conversation["variables"].as_object();
    let mut all = own.cloned().unwrap_or_default();
    all.extend(
        variables
            .iter()
            .map(|(name, value)| (name.to_string(), value.clone())),
    );
    let options = RenderOptions {
        tools: conversation["tools"].as_array().cloned(),
        add_generation_prompt: conversation["add_generation_prompt"]
            .as_bool()
            .unwrap_or(true),
        now: datetime!(2026-03-07 15:04:05 UTC),
        variables: all,
    };
    let special = SpecialTokens {
        bos_token: Some("<s>".to_owned()),
        eos_token: Some("</s>".to_owned()),
        ..SpecialTokens::default()
    };
    let messages = conversation["messages"].as_array().unwrap();
    let template = ChatTemplate::new(source, special);
    match template.and_then(|template| template.render(messages, &options)) {
        Ok(text) => (json!({ "text": text }), String::new()),
        Err(ChatError::Raised { message }) => (json!({ "raised": message }), String::new()),
        Err(error) => {
            let source = std::error::Error::source(&error).map(ToString::to_string);
            (
                json!({ "error": true }),
                format!(" ({error}: {})", source.unwrap_or_default()),
            )
        }
    }
}

fn results() -> BTreeMap<String, (Value, String)> {
    let conversations = json_of("conversations.json");
    let conversations: &Map<String, Value> = conversations.as_object().unwrap();
    let mut results = BTreeMap::new();
    let dir = moe_testkit::repository("crates/moe-engine/tests/fixtures/chat");
    for entry in fs::read_dir(dir).unwrap() {
        let file = entry.unwrap().file_name().into_string().unwrap();
        if let Some(stem) = file.strip_suffix(".jinja") {
            let source = fixture(&file);
            for (name, conversation) in conversations {
                results.insert(
                    format!("{stem}: {name}"),
                    render(&source, conversation, &[]),
                );
            }
        }
    }
    let data = [("data", json_of("data.json"))];
    for line in fixture("expressions.txt").lines() {
        results.insert(
            line.to_owned(),
            render(line, &conversations["question"], &data),
        );
    }
    results
}

#[test]
fn results_are_those_of_jinja2() {
    let expected = json_of("expected.json.zst");
    let results = results();
    assert_eq!(results.len(), expected.as_object().unwrap().len());
    let mut different = Vec::new();
    for (name, (result, error)) in &results {
        let known = DIFFERENCES.contains(&name.as_str());
        if (*result != expected[name]) != known {
            different.push(format!(
                "{name}\n  here   {result}{error}\n  jinja2 {}",
                expected[name]
            ));
        }
    }
    assert!(different.is_empty(), "{}", different.join("\n"));
}

#[test]
fn expected_results_are_current() {
    let Some(python) = moe_testkit::python("jinja2") else {
        return;
    };
    let script = moe_testkit::repository("crates/moe-engine/tests/fixtures/chat/render.py");
    let output = Command::new(python).arg(script).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    assert_eq!(
        String::from_utf8(output.stdout).unwrap(),
        fixture("expected.json.zst")
    );
}

#[test]
fn errors_contain_the_line() {
    let template = |source: &str| ChatTemplate::new(source, SpecialTokens::default());
    let error = template("a\n{% if %}\n").unwrap_err();
    assert_eq!(error.to_string(), "line 2 of the chat template is invalid");
    assert!(
        matches!(error, ChatError::Template { line: 2, .. }),
        "{error:?}"
    );
    let error = template(&"a".repeat(2 << 20)).unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("the chat template has 2097152 bytes"),
        "{error}"
    );

    let render = |source: &str, messages: &[Value]| {
        let template = template(source).unwrap();
        template
            .render(messages, &RenderOptions::default())
            .unwrap_err()
    };
    let user = json!({"role": "user", "content": "a"});
    let error = render(
        "a\n\n{{ messages[0].content + 1 }}",
        std::slice::from_ref(&user),
    );
    assert!(
        matches!(error, ChatError::Render { line: 3, .. }),
        "{error:?}"
    );
    let error = render(
        "{{ raise_exception('no ' ~ messages[0].role) }}",
        std::slice::from_ref(&user),
    );
    assert_eq!(
        error.to_string(),
        "the chat template rejects the conversation: no user"
    );
    for invalid in [json!("a"), json!({"content": "a"}), json!({"role": 1})] {
        let error = render("", &[user.clone(), invalid]);
        assert_eq!(
            error.to_string(),
            "message 1 is not an object with a string \"role\""
        );
    }
}
