//! Descriptions of JSON errors without the terms of serde and Rust, and [`Object`].

use std::fmt;
use std::marker::PhantomData;

use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::error::Category;

/// Reads a `T` from an object only. Structures that derive `Deserialize` can also be read from a list of the values of their keys.
#[derive(Debug)]
pub struct Object<T>(pub T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Map<T>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>> Visitor<'de> for Map<T> {
            type Value = T;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<T, A::Error> {
                T::deserialize(MapAccessDeserializer::new(map))
            }
        }

        deserializer.deserialize_map(Map(PhantomData)).map(Object)
    }
}

/// Describes the error without its position: a missing or unknown key, a value of the wrong type, or invalid JSON.
pub fn reason(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let place = format!(" at line {} column {}", error.line(), error.column());
    let text = text.strip_suffix(&place).unwrap_or(&text);
    match error.classify() {
        Category::Data => data(text).unwrap_or_else(|| shortened(text)),
        Category::Eof => "the text ends within a JSON value".to_owned(),
        Category::Syntax if text.contains("expected key to be a number") => {
            "a key is not a number".to_owned()
        }
        Category::Syntax => shortened(&format!("it is not JSON: {text}")),
        Category::Io => shortened(text),
    }
}

/// Maximum numbers of characters at the start and at the end of a shortened text.
const N_FIRST: usize = 200;
const N_LAST: usize = 100;

/// Shortens the middle of a long text, because messages of serde quote strings of the file, which may have any length.
fn shortened(text: &str) -> String {
    let n = text.chars().count();
    if n <= N_FIRST + N_LAST {
        return text.to_owned();
    }
    let first: String = text.chars().take(N_FIRST).collect();
    let last: String = text.chars().skip(n - N_LAST).collect();
    format!("{first}…{last}")
}

/// Shortens the middle of a long list of names, between two names.
fn shortened_names(names: &str) -> String {
    if names.chars().count() <= N_FIRST + N_LAST {
        return names.to_owned();
    }
    let names: Vec<&str> = names.split(", ").collect();
    let n_first = n_fitting(names.iter(), N_FIRST);
    let n_last = n_fitting(names.iter().rev(), N_LAST);
    let (first, last) = (&names[..n_first], &names[names.len() - n_last..]);
    format!("{}, …, {}", first.join(", "), last.join(", "))
}

/// Number of names whose texts with separators have at most `max` characters.
fn n_fitting<'a>(names: impl Iterator<Item = &'a &'a str>, max: usize) -> usize {
    let mut n = 0;
    let mut n_names = 0;
    for name in names {
        n += name.chars().count() + 2;
        if n > max {
            break;
        }
        n_names += 1;
    }
    n_names
}

/// Describes the error like [`reason`], after its line and column.
pub fn reason_with_location(error: &serde_json::Error) -> String {
    let (line, column) = (error.line(), error.column());
    format!("line {line}, column {column}: {}", reason(error))
}

/// Translates serde's messages for valid JSON with other keys or types than expected.
fn data(text: &str) -> Option<String> {
    if let Some(key) = text.strip_prefix("missing field ") {
        return Some(format!("the key {key} is missing"));
    }
    if let Some(key) = text.strip_prefix("duplicate field ") {
        return Some(format!("the key {key} appears twice"));
    }
    let (found, expected) = text.split_once(", expected ")?;
    let one_of = expected.strip_prefix("one of ").unwrap_or(expected);
    if let Some(key) = found.strip_prefix("unknown field ") {
        let (key, known) = (shortened(key), shortened_names(one_of));
        return Some(format!("the key {key} is unknown; known are {known}"));
    }
    if let Some(value) = found.strip_prefix("unknown variant ") {
        let (value, known) = (shortened(value), shortened_names(one_of));
        return Some(format!("the value {value} is unknown; known are {known}"));
    }
    if let Some(n) = found.strip_prefix("invalid length ") {
        return Some(format!("{n} elements instead of {}", kind(expected)));
    }
    let found = found
        .strip_prefix("invalid type: ")
        .or_else(|| found.strip_prefix("invalid value: "))?;
    let found = match found.split_once(' ') {
        Some(("string", value)) => value,
        Some(("integer" | "boolean", value)) => value.trim_matches('`'),
        Some(("floating", value)) => value.trim_start_matches("point ").trim_matches('`'),
        _ => kind(found),
    };
    Some(shortened(&format!("{found} instead of {}", kind(expected))))
}

/// The JSON term for a type of Rust or serde.
fn kind(name: &str) -> &str {
    match name {
        "u8" => "an integer (0..=255)",
        "u16" => "an integer (0..=65535)",
        "u32" => "an integer (0..=4294967295)",
        "u64" | "usize" => "a non-negative 64-bit integer",
        "i8" => "an integer (-128..=127)",
        "i16" => "an integer (-32768..=32767)",
        "i32" => "an integer (-2147483648..=2147483647)",
        "i64" | "isize" => "a 64-bit integer",
        "f32" | "f64" => "a number",
        "sequence" | "a sequence" => "a list",
        "map" | "a map" => "an object",
        "unit value" => "nothing",
        _ if name.starts_with("struct ") => "an object",
        _ if name.contains("enum ") => "one of its names",
        _ => name,
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    #[allow(dead_code)] // only read by serde
    struct Example {
        n: u32,
        #[serde(default)]
        x: Option<f64>,
        #[serde(default)]
        list: Vec<(u32, u32)>,
        #[serde(default)]
        kind: Option<Kind>,
    }

    #[derive(Debug, Deserialize)]
    #[serde(rename_all = "lowercase")]
    enum Kind {
        Moe,
        Dense,
    }

    fn reason_of(text: &str) -> String {
        reason(&serde_json::from_str::<Example>(text).unwrap_err())
    }

    #[test]
    fn quotes_only_the_ends_of_a_long_string() {
        let reason = reason_of(&format!("{{\"n\":\"a{}z\"}}", "é".repeat(5000)));
        assert_eq!(reason.chars().count(), 301);
        assert!(reason.starts_with("\"aéé"), "{reason}");
        let end = "z\" instead of an integer (0..=4294967295)";
        assert!(reason.ends_with(end), "{reason}");
    }

    #[test]
    fn shortens_lists_between_names() {
        assert_eq!(shortened_names("`a`, `b`"), "`a`, `b`");
        let names: Vec<String> = (10..60).map(|n| format!("`name{n}`")).collect();
        // A name and its separator have 10 characters.
        let expected = format!("{}, …, {}", names[..20].join(", "), names[40..].join(", "));
        assert_eq!(shortened_names(&names.join(", ")), expected);
    }

    #[test]
    fn describes_errors_in_json_terms() {
        let integer = "instead of an integer (0..=4294967295)";
        for (text, expected) in [
            ("{}", "the key `n` is missing".to_owned()),
            ("{\"n\":1,\"n\":2}", "the key `n` appears twice".to_owned()),
            (
                "{\"n\":1,\"m\":2}",
                "the key `m` is unknown; known are `n`, `x`, `list`, `kind`".to_owned(),
            ),
            (
                "{\"n\":1,\"kind\":\"x\"}",
                "the value `x` is unknown; known are `moe` or `dense`".to_owned(),
            ),
            ("{\"n\":\"8\"}", format!("\"8\" {integer}")),
            ("{\"n\":-1}", format!("-1 {integer}")),
            ("{\"n\":1.5}", format!("1.5 {integer}")),
            ("{\"n\":null}", format!("null {integer}")),
            ("{\"n\":[1]}", format!("a list {integer}")),
            (
                "{\"n\":1,\"x\":true}",
                "true instead of a number".to_owned(),
            ),
            (
                "{\"n\":1,\"list\":{}}",
                "an object instead of a list".to_owned(),
            ),
            ("[]", "0 elements instead of an object".to_owned()),
            ("5", "5 instead of an object".to_owned()),
            ("{\"n\":1", "the text ends within a JSON value".to_owned()),
            ("", "the text ends within a JSON value".to_owned()),
            ("n=1", "it is not JSON: expected ident".to_owned()),
            ("GGUF", "it is not JSON: expected value".to_owned()),
        ] {
            assert_eq!(reason_of(text), expected, "{text}");
        }
    }

    #[test]
    fn reads_a_structure_from_an_object_only() {
        let Object(example) = serde_json::from_str::<Object<Example>>("{\"n\":7}").unwrap();
        assert_eq!(example.n, 7);
        for (text, expected) in [
            ("[7, null, [], null]", "a list instead of an object"),
            ("[]", "a list instead of an object"),
            ("5", "5 instead of an object"),
            ("{}", "the key `n` is missing"),
            (
                "{\"n\":true}",
                "true instead of an integer (0..=4294967295)",
            ),
            ("{\"n\":1", "the text ends within a JSON value"),
        ] {
            let error = serde_json::from_str::<Object<Example>>(text).unwrap_err();
            assert_eq!(reason(&error), expected, "{text}");
        }
    }

    #[test]
    fn states_line_and_column() {
        let error = serde_json::from_str::<Example>("{\n\"n\": true}").unwrap_err();
        let message = reason_with_location(&error);
        assert!(
            message.starts_with("line 2, column 9: true instead of"),
            "{message}"
        );
    }
}
