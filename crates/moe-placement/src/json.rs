//! JSON of other programs: what Python writes for numbers that are not finite is not JSON, and is named in errors.

use serde::de::DeserializeOwned;

/// Why a text is refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JsonError {
    /// A number that is not finite, as Python writes it.
    #[error("{value} is not JSON (line {line}, column {column}); replace it by null")]
    NotFinite {
        /// `NaN`, `Infinity` or `-Infinity`.
        value: &'static str,
        /// Its line, from 1.
        line: usize,
        /// Its column, from 1.
        column: usize,
    },
    /// Anything else.
    #[error(transparent)]
    Invalid(serde_json::Error),
}

impl JsonError {
    /// The reason why `text` is refused, which serde_json found an `error` in.
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

/// Reads a document.
///
/// # Errors
/// [`JsonError`].
pub fn parse<T: DeserializeOwned>(text: &str) -> Result<T, JsonError> {
    serde_json::from_str(text).map_err(|error| JsonError::new(error, text))
}

/// The value at the place of an error that Python writes for a number that is not finite, if it is one.
pub fn non_finite(error: &serde_json::Error, text: &[u8]) -> Option<&'static str> {
    let lines = error.line().checked_sub(1)?;
    let line = text.split(|&byte| byte == b'\n').nth(lines)?;
    non_finite_at(line.get(error.column().saturating_sub(2)..)?)
}

/// As [`non_finite`], of the bytes from the one before the place of an error.
pub fn non_finite_at(bytes: &[u8]) -> Option<&'static str> {
    // Of `-Infinity`, the byte after the sign is the wrong one.
    let values = ["-Infinity", "Infinity", "NaN"];
    let places = [bytes, bytes.get(1..).unwrap_or_default()];
    let is_at = |value: &&str| places.iter().any(|at| at.starts_with(value.as_bytes()));
    values.into_iter().find(is_at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_that_python_writes_are_named() {
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
    fn messages_have_the_place() {
        let error = parse::<serde_json::Value>("{\"a\":\n[NaN]}").unwrap_err();
        assert_eq!(
            error.to_string(),
            "NaN is not JSON (line 2, column 2); replace it by null"
        );
        let error = parse::<serde_json::Value>("[").unwrap_err();
        assert!(matches!(error, JsonError::Invalid(_)));
    }
}
