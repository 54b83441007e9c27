//! Lists of the names of cache policies and predictors contain every name: messages, help texts, pages, and the schema of the manifest.

use std::fs;

use moe_placement::cache::{OnlinePolicy, PolicyName};
use moe_placement::predict::PredictorName;
use serde_json::{Value, json};

use crate::support::{repository, run};

/// The policies without those of a separate cache per layer, whose names the lists describe as `layerNAME`.
fn policies() -> Vec<String> {
    let all = PolicyName::all().into_iter();
    let named = all.filter(|policy| !matches!(policy, PolicyName::Layered(_)));
    named.map(|policy| policy.to_string()).collect()
}

fn online_policies() -> Vec<String> {
    OnlinePolicy::ALL
        .map(|policy| policy.name().to_owned())
        .into()
}

fn predictors() -> Vec<String> {
    PredictorName::ALL
        .map(|predictor| predictor.to_string())
        .into()
}

/// Asserts that each name is a word of a text.
#[track_caller]
fn assert_lists(place: &str, text: &str, names: &[String]) {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric());
    let words: Vec<&str> = words.collect();
    for name in names {
        assert!(words.contains(&name.as_str()), "{place} lacks {name}: {text}");
    }
}

/// The help text of an option, without its default.
fn help_of(subcommand: &str, option: &str) -> String {
    let help = run![subcommand, "--help"];
    let (_, text) = help.split_once(&format!("{option} <")).unwrap();
    let lines = text
        .lines()
        .take_while(|line| !line.trim_start().starts_with('-'));
    let text = lines.collect::<Vec<&str>>().join(" ");
    text.split("[default").next().unwrap().to_owned()
}

/// The line of a page of `docs/` that starts with a text.
fn line_of(page: &str, start: &str) -> String {
    let text = fs::read_to_string(repository("docs").join(page)).unwrap();
    let line = text.lines().find(|line| line.starts_with(start));
    line.unwrap_or_else(|| panic!("{page} has no line {start}"))
        .to_owned()
}

#[test]
fn messages_list_all_names() {
    let error = "best".parse::<PolicyName>().unwrap_err().to_string();
    assert_lists("the error", &error, &policies());
    assert_lists("the list", &OnlinePolicy::alternatives(), &online_policies());
    let error = "best".parse::<PredictorName>().unwrap_err().to_string();
    assert_lists("the error", &error, &predictors());
}

#[test]
fn help_lists_all_names() {
    for (subcommand, option, names) in [
        ("record", "--cache-policy", online_policies()),
        ("record", "--predictor", predictors()),
        ("simulate", "--policy", policies()),
        ("simulate", "--predictor", predictors()),
    ] {
        let place = format!("{subcommand} {option}");
        assert_lists(&place, &help_of(subcommand, option), &names);
    }
}

#[test]
fn pages_list_all_names() {
    for (page, start, names) in [
        ("hot-cache.md", "| `--cache-policy NAME`", online_policies()),
        ("simulating-caches.md", "`--predictor ", predictors()),
    ] {
        assert_lists(page, &line_of(page, start), &names);
    }
    for name in policies().iter().chain(&predictors()) {
        line_of("cache-policies.md", &format!("| `{name}` |"));
    }
}

#[test]
fn schema_of_manifest_accepts_all_names() {
    let schema = fs::read_to_string(repository("schemas/run.schema.json")).unwrap();
    let schema: Value = serde_json::from_str(&schema).unwrap();
    let cache = &schema["properties"]["dynamic_cache"]["properties"];
    let policy = jsonschema::validator_for(&cache["policy"]).unwrap();
    for online in OnlinePolicy::ALL {
        for name in [PolicyName::Shared(online), PolicyName::Layered(online)] {
            assert!(policy.is_valid(&json!(name.to_string())), "{name}");
        }
    }
    assert!(!policy.is_valid(&json!("best")));
    assert_eq!(cache["predictor"]["enum"], json!(predictors()));
}
