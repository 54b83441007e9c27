//! JSON with clear errors for `NaN` and infinities, which Python's `json` module writes although they are not JSON, and for repeated
//! keys, of which parsers use only the last.

use std::collections::HashSet;
use std::fmt;

use serde::de::{
    DeserializeOwned, DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor,
};

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
    let mut repeated = None;
    let mut json = serde_json::Deserializer::from_str(text);
    if let Err(error) = UniqueKeys(&mut repeated).deserialize(&mut json) {
        return Err(match repeated {
            Some(key) => JsonError::RepeatedKey {
                key,
                line: error.line(),
                column: error.column(),
            },
            None => JsonError::new(error, text),
        });
    }
    parse(text)
}

/// Reads a value and keeps nothing of it. Fails at the first repeated key and stores the key.
struct UniqueKeys<'a>(&'a mut Option<String>);

impl<'de> DeserializeSeed<'de> for UniqueKeys<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for UniqueKeys<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_bool<E>(self, _: bool) -> Result<(), E> {
        Ok(())
    }

    fn visit_i64<E>(self, _: i64) -> Result<(), E> {
        Ok(())
    }

    fn visit_u64<E>(self, _: u64) -> Result<(), E> {
        Ok(())
    }

    fn visit_f64<E>(self, _: f64) -> Result<(), E> {
        Ok(())
    }

    fn visit_str<E>(self, _: &str) -> Result<(), E> {
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut values: A) -> Result<(), A::Error> {
        while values
            .next_element_seed(UniqueKeys(&mut *self.0))?
            .is_some()
        {}
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<(), A::Error> {
        let mut keys = HashSet::new();
        while let Some(key) = entries.next_key::<String>()? {
            if keys.contains(&key) {
                *self.0 = Some(key);
                return Err(A::Error::custom("repeated key"));
            }
            keys.insert(key);
            entries.next_value_seed(UniqueKeys(&mut *self.0))?;
        }
        Ok(())
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
        let value: serde_json::Value = parse_unique(good).unwrap();
        assert_eq!(value, parse::<serde_json::Value>(good).unwrap());
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
}
