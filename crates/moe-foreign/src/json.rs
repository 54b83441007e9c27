//! JSON documents and lines.

use std::path::Path;

use moe_trace::bounded;
use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::error::{At, ForeignError};
use crate::source;

/// Reads a JSON document of a known shape, whose numbers make up most of it.
pub(crate) fn document<T: DeserializeOwned>(path: &Path) -> Result<T, ForeignError> {
    parse(path, &source::read_whole(path)?)
}

/// Reads a JSON document of a known shape whose lists and maps may take many times the memory of its text.
///
/// # Errors
/// Also if it is larger than 32 MiB.
pub(crate) fn small_document<T: DeserializeOwned>(path: &Path) -> Result<T, ForeignError> {
    parse(path, &bounded::read(path, bounded::MAX_DOCUMENT)?)
}

fn parse<T: DeserializeOwned>(path: &Path, bytes: &[u8]) -> Result<T, ForeignError> {
    serde_json::from_slice(bytes).map_err(|error| invalid_in(path, &error, 0, bytes))
}

/// Reads the JSON of one line.
pub(crate) fn line<'a, T: Deserialize<'a>>(
    path: &Path,
    line: u64,
    text: &'a str,
) -> Result<T, ForeignError> {
    serde_json::from_str(text).map_err(|error| invalid_in(path, &error, line - 1, text.as_bytes()))
}

/// What serde_json says, with the line in the file; `lines_before` are those before the text that it read.
pub(crate) fn invalid(path: &Path, error: &serde_json::Error, lines_before: u64) -> ForeignError {
    invalid_in(path, error, lines_before, b"")
}

/// As [`invalid`], of a text that is at hand.
pub(crate) fn invalid_in(
    path: &Path,
    error: &serde_json::Error,
    lines_before: u64,
    text: &[u8],
) -> ForeignError {
    let line = lines_before + error.line().max(1) as u64;
    let reason = match not_json(error, text) {
        Some(value) => format!(
            "{value} is not JSON (column {}); replace it by null",
            error.column()
        ),
        None => format!(
            "{} (column {}); the file is damaged, or of another format",
            reason(error),
            error.column()
        ),
    };
    ForeignError::invalid(path, At::Line(line), reason)
}

/// What serde_json says, without its line and column.
pub(crate) fn reason(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let place = format!(" at line {} column {}", error.line(), error.column());
    text.strip_suffix(&place).unwrap_or(&text).to_owned()
}

/// The value at the place of an error that Python writes for a float that is not finite, if it is one.
pub(crate) fn not_json(error: &serde_json::Error, text: &[u8]) -> Option<&'static str> {
    let line = text
        .split(|&byte| byte == b'\n')
        .nth(error.line().checked_sub(1)?)?;
    // Columns start at 1; of `-Infinity`, the one after the sign is the wrong one.
    let at = error.column().checked_sub(1)?;
    let places = [at, at.saturating_sub(1)];
    let values = ["NaN", "Infinity", "-Infinity"];
    values.into_iter().rev().find(|value| {
        places.iter().any(|&at| {
            line.get(at..)
                .is_some_and(|rest| rest.starts_with(value.as_bytes()))
        })
    })
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
            assert_eq!(not_json(&error, text.as_bytes()), expected, "{text}");
        }
    }
}
