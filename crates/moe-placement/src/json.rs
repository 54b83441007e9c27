//! JSON with clear errors for `NaN` and infinities, which Python's `json` module writes although they are not JSON, and for repeated
//! keys, of which parsers use only the last.

use std::fmt;

use serde::de::{
    DeserializeOwned, DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor,
};
use serde_json::{Map, Value};

/// Reason why a text is not valid JSON.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JsonError {
    /// A number that is not finite, in Python's notation.
    #[error("{value} is not JSON (line {line}, column {column})")]
    NotFinite {
        /// `NaN`, `Infinity` or `-Infinity`.
        value: &'static str,
        /// Line, from 1.
        line: usize,
        /// Column, from 1.
        column: usize,
    },
    /// An object contains a key twice.
    #[error("the key {key:?} appears twice (line {line}, column {column}); remove one of them")]
    RepeatedKey {
        /// The key.
        key: String,
        /// Line, from 1.
        line: usize,
        /// Column, from 1.
        column: usize,
    },
    /// Any other syntax or type error.
    #[error("{}", syntax_error(.0))]
    Invalid(serde_json::Error),
}

fn syntax_error(error: &serde_json::Error) -> String {
    if error.is_eof() {
        let (line, column) = (error.line(), error.column());
        return format!("the text ends within a JSON value (line {line}, column {column})");
    }
    error.to_string()
}

impl JsonError {
    /// Classifies an `error` that serde_json reported for `text`.
    pub fn new(error: serde_json::Error, text: &str) -> JsonError {
        match non_finite(&error, text.as_bytes()) {
            Some(value) => JsonError::NotFinite {
                value,
                line: error.line(),
                column: error.column(),
            },
            None => JsonError::Invalid(error),
        }
    }
}

/// Parses a document.
///
/// # Errors
/// [`JsonError`] if `text` is not JSON or does not match `T`.
pub fn parse<T: DeserializeOwned>(text: &str) -> Result<T, JsonError> {
    serde_json::from_str(text).map_err(|error| JsonError::new(error, text))
}

/// Parses a document in which no object contains a key twice. Objects of all depths are checked, also if `T` ignores them.
///
/// # Errors
/// [`JsonError::RepeatedKey`]; otherwise like [`parse`].
pub fn parse_unique<T: DeserializeOwned>(text: &str) -> Result<T, JsonError> {
    let value = unique_value(text)?;
    // An error in a value has no line: the text is read again for it.
    serde_json::from_value(value).or_else(|_| parse(text))
}

/// Like [`parse_unique`], as a tree of values.
pub(crate) fn unique_value(text: &str) -> Result<Value, JsonError> {
    let mut repeated = None;
    let mut json = serde_json::Deserializer::from_str(text);
    let value = UniqueKeys(&mut repeated).deserialize(&mut json);
    let value = value.and_then(|value| json.end().map(|()| value));
    value.map_err(|error| match repeated {
        Some(key) => JsonError::RepeatedKey {
            key,
            line: error.line(),
            column: error.column(),
        },
        None => JsonError::new(error, text),
    })
}

/// Reads a value like [`Value`]. Fails at the first repeated key and stores the key.
struct UniqueKeys<'a>(&'a mut Option<String>);

impl<'de> DeserializeSeed<'de> for UniqueKeys<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for UniqueKeys<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::from(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(Value::from(value))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(Value::from(value))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(Value::from(value))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(Value::from(value))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut values: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(value) = values.next_element_seed(UniqueKeys(&mut *self.0))? {
            list.push(value);
        }
        Ok(Value::Array(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut map = Map::new();
        while let Some(key) = entries.next_key::<String>()? {
            if map.contains_key(&key) {
                *self.0 = Some(key);
                return Err(A::Error::custom("repeated key"));
            }
            map.insert(key, entries.next_value_seed(UniqueKeys(&mut *self.0))?);
        }
        Ok(Value::Object(map))
    }
}

/// The non-finite number in Python's notation at the position of `error` in `text`: `NaN`, `Infinity` or `-Infinity`. `None` for
/// other errors.
pub fn non_finite(error: &serde_json::Error, text: &[u8]) -> Option<&'static str> {
    let lines = error.line().checked_sub(1)?;
    let line = text.split(|&byte| byte == b'\n').nth(lines)?;
    non_finite_at(line.get(error.column().saturating_sub(2)..)?)
}

/// Like [`non_finite`], for bytes that start one byte before the position of the error.
pub fn non_finite_at(bytes: &[u8]) -> Option<&'static str> {
    // In `-Infinity`, serde_json reports the byte after the sign.
    let values = ["-Infinity", "Infinity", "NaN"];
    let places = [bytes, bytes.get(1..).unwrap_or_default()];
    let is_at = |value: &&str| places.iter().any(|at| at.starts_with(value.as_bytes()));
    values.into_iter().find(is_at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_non_finite_numbers_of_python() {
        for (text, expected) in [
            ("{\"a\":[1.0, NaN]}", Some("NaN")),
            ("{\"a\":\n Infinity}", Some("Infinity")),
            ("[-Infinity]", Some("-Infinity")),
            ("[nan]", None),
            ("{\"NaN\":}", None),
        ] {
            let error = serde_json::from_str::<serde_json::Value>(text).unwrap_err();
            assert_eq!(non_finite(&error, text.as_bytes()), expected, "{text}");
        }
    }

    #[test]
    fn error_contains_line_and_column() {
        let error = parse::<serde_json::Value>("{\"a\":\n[NaN]}").unwrap_err();
        assert_eq!(error.to_string(), "NaN is not JSON (line 2, column 2)");
        let error = parse::<serde_json::Value>("[").unwrap_err();
        assert!(matches!(error, JsonError::Invalid(_)));
    }

    #[test]
    fn rejects_repeated_keys_of_one_object() {
        let good =
            r#"{"a": [1, -2, 0.5, null, true, "a"], "b": {"a": {}, "c": [{"a": 1}, {"a": 2}]}}"#;
        let value: Value = parse_unique(good).unwrap();
        assert_eq!(value, parse::<Value>(good).unwrap());
        for (text, place) in [
            ("{\"a\": 1, \"a\": 2}", (1, 12)),
            ("[{\"b\":\n{\"a\": [], \"\\u0061\": []}}]", (2, 18)),
        ] {
            match parse_unique::<serde::de::IgnoredAny>(text) {
                Err(JsonError::RepeatedKey { key, line, column }) => {
                    assert_eq!(key, "a");
                    assert_eq!((line, column), place, "{text}");
                }
                other => panic!("{text}: {other:?}"),
            }
        }
        assert!(matches!(
            parse_unique::<serde_json::Value>("{\"a\": NaN}"),
            Err(JsonError::NotFinite { value: "NaN", .. })
        ));
    }

    #[test]
    fn unique_value_equals_value_of_serde_json() {
        let text = "[18446744073709551615, -9223372036854775808, 18446744073709551616, 0.1, -0.0, 1e308, 5e-324, \"\\u00e9\"]";
        let value = unique_value(text).unwrap();
        assert_eq!(value, parse::<Value>(text).unwrap());
        assert_eq!(value[0].as_u64(), Some(u64::MAX));
        assert_eq!(value[1].as_i64(), Some(i64::MIN));
        assert_eq!(value[3].as_f64(), Some(0.1));
        let names: Value = unique_value("{\"b\": 1, \"a\": 2}").unwrap();
        assert_eq!(names.to_string(), "{\"b\":1,\"a\":2}");
    }

    #[test]
    fn type_errors_and_trailing_text_have_line_and_column() {
        for (text, place) in [("[1,\n\"a\"]", (2, 3)), ("[1]\n 2", (2, 2))] {
            match parse_unique::<Vec<u32>>(text) {
                Err(JsonError::Invalid(error)) => {
                    assert_eq!((error.line(), error.column()), place, "{text}");
                }
                other => panic!("{text}: {other:?}"),
            }
        }
    }
}
