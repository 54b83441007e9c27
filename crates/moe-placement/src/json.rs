//! JSON with clear errors for `NaN` and infinities, which Python's `json` module writes although they are not JSON.

use serde::de::DeserializeOwned;

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
}
