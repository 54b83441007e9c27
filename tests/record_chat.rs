//! `record` with chat templates.

use std::fs;
use std::path::{Path, PathBuf};

use moe_gguf::Value;
use serde_json::Value as Json;

use crate::support::{arg, fail, file_of, repository, run, write_gguf};

const TEMPLATE: &str = "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}\
                        {% if tools %}[{{ tools | length }}]{% endif %}{% if add_generation_prompt %}<assistant>{% endif %}";

fn fixture() -> PathBuf {
    repository("fixtures/tiny-qwen3moe-Q4_K_M.gguf")
}

/// A copy of the fixture with chat templates.
fn model(dir: &Path, keys: &[(&str, &str)]) -> PathBuf {
    let path = dir.join("chat.gguf");
    let like = moe_gguf::Gguf::open(fixture()).unwrap();
    let keys: Vec<(&str, Value)> = keys
        .iter()
        .map(|(key, text)| (*key, Value::String(text.to_string())))
        .collect();
    write_gguf(&path, Some(&like), &keys, &[]);
    path
}

fn manifest(run: &Path) -> Json {
    serde_json::from_slice(&fs::read(run.join("manifest.json")).unwrap()).unwrap()
}

const SHORT: [&str; 4] = ["--quiet", "record", "--n-predict", "2"];

#[test]
fn chat_renders_prompt_as_message_of_a_user() {
    let dir = tempfile::tempdir().unwrap();
    let model = model(dir.path(), &[("tokenizer.chat_template", TEMPLATE)]);
    let (chat, text) = (dir.path().join("chat"), dir.path().join("text"));
    let with_chat = ["--prompt", "The kernel", "--chat", "--keep-prompt"];
    let stdout = run![SHORT, "--model", model, with_chat, "--out", chat];
    let found = manifest(&chat);
    let rendered = "<|endoftext|><user>The kernel<assistant>";
    assert_eq!(found["prompts"], serde_json::json!([rendered]));
    assert_eq!(found["chat_template"]["origin"], "model");

    // The vocabulary and the template add the BOS token; it is evaluated once.
    let plain = ["--prompt", "<user>The kernel<assistant>"];
    assert_eq!(run![SHORT, "--model", model, plain, "--out", text], stdout);
    let without_chat = manifest(&text);
    assert_eq!(without_chat["tokens"], found["tokens"]);
    assert!(without_chat.get("chat_template").is_none(), "{without_chat}");
}

#[test]
fn messages_in_lines_are_rendered() {
    let dir = tempfile::tempdir().unwrap();
    let tools = "{{ tools | map(attribute='name') | join }}";
    let keys = [("tokenizer.chat_template", TEMPLATE), ("tokenizer.chat_template.tool_use", tools)];
    let model = model(dir.path(), &keys);
    let lines = concat!(
        "{\"messages\":[{\"role\":\"system\",\"content\":\"a\"},{\"role\":\"user\",\"content\":\"b\"}]}\n",
        "{\"messages\":[{\"role\":\"user\",\"content\":\"b\"}],\"tools\":[{\"name\":\"f\"}]}\n",
        "{\"prompt\":\"c\"}\n{\"tokens\":[5,6]}\n",
    );
    let lines = file_of(dir.path(), "prompts.jsonl", lines);
    let record = |name: &str, more: &[&str]| {
        let out = dir.path().join(name);
        run![SHORT, "--model", model, "--prompts", lines, "--keep-prompt", "--out", out, more];
        manifest(&out)["prompts"].clone()
    };
    let system = "<|endoftext|><system>a<user>b<assistant>";
    let user = "<|endoftext|><user>c<assistant>";
    assert_eq!(record("lines", &[]), serde_json::json!([system, "f", "c"]));
    assert_eq!(record("chat", &["--chat"]), serde_json::json!([system, "f", user]));
}

#[test]
fn template_of_a_file_replaces_that_of_the_model() {
    let dir = tempfile::tempdir().unwrap();
    let template = file_of(dir.path(), "t.jinja", "{{ messages[0].content }}!");
    let out = dir.path().join("run");
    let options = ["--prompt", "a", "--chat", "--chat-template", arg(&template), "--keep-prompt"];
    run![SHORT, options, "--out", out];
    let found = manifest(&out);
    assert_eq!(found["prompts"], serde_json::json!(["a!"]));
    assert_eq!(found["chat_template"]["origin"], "file");
}

#[test]
fn errors_name_template_line_and_message() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| file_of(dir.path(), name, text);
    let invalid = file("invalid.jinja", "a\n{% if %}\n");
    let raises = file("raises.jinja", "{{ raise_exception('no ' ~ messages[0].role) }}");
    let fails = file("fails.jinja", "\n\n{{ messages[0].content + 1 }}");
    let good = file("good.jinja", "a");
    let no_role =
        file("no-role.jsonl", "{\"prompt\":\"a\"}\n{\"messages\":[{\"content\":\"a\"}]}\n");
    let no_list = file("no-list.jsonl", "{\"prompt\":\"a\"}\n{\"messages\":\"a\"}\n");
    let out = dir.path().join("run");
    for (options, expected) in [
        (
            &["--chat"][..],
            "the model has no chat template (tokenizer.chat_template); pass one with --chat-template FILE",
        ),
        (
            &["--chat", "--chat-template", arg(&invalid)],
            "invalid.jinja: line 2 of the chat template is invalid: unexpected end of block; correct the template, or omit --chat-template",
        ),
        (
            &["--chat", "--chat-template", arg(&raises)],
            "the chat template rejects the conversation: no user",
        ),
        (
            &["--chat", "--chat-template", arg(&fails)],
            "line 3 of the chat template fails for this conversation: invalid operation: tried to use + operator on unsupported types string and number",
        ),
        (&["--chat", "--chat-template", "missing.jinja"], "cannot open missing.jinja"),
        (&["--chat-template", arg(&good)], "--chat-template has no effect without a conversation"),
        (
            &["--prompts", arg(&no_role), "--chat-template", arg(&good)],
            "no-role.jsonl, line 2: message 0 is not an object with a string \"role\"",
        ),
        (&["--prompts", arg(&no_list)], "no-list.jsonl, line 2, column 15: \"a\" instead of"),
    ] {
        let line = fail![SHORT, options, "--out", out];
        assert!(line.contains(expected), "{options:?}: {line}");
        assert!(!out.exists(), "{options:?}");
    }
}
