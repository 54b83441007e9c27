//! Templates that would need unlimited time, memory or stack.

use moe_engine::chat::{ChatError, ChatTemplate, RenderOptions, SpecialTokens};
use serde_json::json;

fn render(source: &str) -> Result<String, ChatError> {
    let messages = [json!({"role": "user", "content": "a"})];
    let template = ChatTemplate::new(source, SpecialTokens::default())?;
    template.render(&messages, &RenderOptions::default())
}

#[track_caller]
fn assert_limited(source: &str) {
    match render(source) {
        Err(ChatError::Limit { .. } | ChatError::Render { .. }) => {}
        other => panic!("{other:?}"),
    }
}

#[test]
fn loops_end() {
    assert_limited(
        "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}",
    );
}

#[test]
fn output_is_limited() {
    assert_limited("{% set x = 'a' * 100000 %}{% for i in range(90000) %}{{ x }}{% endfor %}");
}

#[test]
fn strings_are_limited() {
    assert_limited(
        "{% set n = namespace(x='aaaaaaaa') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    );
    assert_limited("{{ 'a' * 99999999999 }}");
    assert_limited("{{ ('a' * 100000).replace('a', 'b' * 100000) | length }}");
}

#[test]
fn recursion_of_macros_ends() {
    assert_limited("{% macro m(x) %}{{ m(x) }}{% endmacro %}{{ m(1) }}");
}

#[test]
fn values_that_contain_a_value_twice_are_limited() {
    let doubled = "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}";
    assert_limited(&format!("{doubled}{{{{ n.x | tojson }}}}"));
    assert_limited(&format!("{doubled}{{{{ n.x }}}}"));
}

#[test]
fn depth_of_values_is_limited() {
    let nested =
        "{% set n = namespace(x=[]) %}{% for i in range(2000) %}{% set n.x = [n.x] %}{% endfor %}";
    assert_limited(&format!("{nested}{{{{ n.x | tojson }}}}"));
}

#[test]
fn nesting_of_expressions_is_limited() {
    let error = render(&("{{ ".to_owned() + &"(".repeat(1000))).unwrap_err();
    assert!(
        matches!(error, ChatError::Template { line: 1, .. }),
        "{error:?}"
    );
    let error = render(&"{% if a %}".repeat(5000)).unwrap_err();
    assert!(matches!(error, ChatError::Template { .. }), "{error:?}");
}

/// The parser's own limit does not cover chains of operators.
#[test]
fn chains_of_operators_do_not_overflow_the_stack() {
    for (start, operator, n, end, expected) in [
        ("{% if ", "not ", 1362, "1 %}a{% endif %}", "a"),
        ("{{ ", "1+", 2040, "1 }}", "2041"),
        ("{{ 0", "-1", 2040, " }}", "-2040"),
        ("{{ messages", "|list", 800, "|length }}", "1"),
        ("{% if 0 %}", "{% elif 0 %}", 5000, "{% endif %}", ""),
    ] {
        let source = |n| format!("\n{start}{}{end}", operator.repeat(n));
        assert_eq!(render(&source(n)).unwrap().trim(), expected, "{operator}");
    }
    for operator in ["not ", "1+", "- ", "1 if 1 else "] {
        let error = render(&format!("\n{{{{ {}1 }}}}", operator.repeat(5000))).unwrap_err();
        assert!(
            matches!(error, ChatError::TooComplex { line: 2, .. }),
            "{error:?}"
        );
    }
    let error = render(&format!("{{{{ {}1 }}}}", "not ".repeat(32_000))).unwrap_err();
    assert!(matches!(error, ChatError::TooLong { .. }), "{error:?}");
}

#[test]
fn long_conversations_are_not_limited() {
    let source = "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}\n{% endfor %}";
    let template = ChatTemplate::new(source, SpecialTokens::default()).unwrap();
    let message = json!({"role": "user", "content": "word ".repeat(20_000)});
    let messages = vec![message; 200];
    let text = template
        .render(&messages, &RenderOptions::default())
        .unwrap();
    assert_eq!(text.len(), 200 * (100_000 - 1 + "user: \n".len()));
}
