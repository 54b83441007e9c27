//! JSON documents and JSON lines, with errors that name the line.

use std::io::{self, BufRead, Read};
use std::path::Path;

use moe_placement::json::{non_finite, non_finite_at};
use moe_trace::bounded;
use moe_trace::json::{Object, reason};
use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::error::{ForeignError, Location};
use crate::source;

/// Why a text is not the expected JSON.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum JsonError {
    /// A number is `NaN`, `Infinity` or `-Infinity`.
    #[error("{value} is not JSON (column {column}); replace it with null")]
    NonFinite {
        /// The text of the value.
        value: String,
        /// Column in bytes, counted from 1.
        column: usize,
    },
    /// The text is not JSON, or the JSON does not have the structure of the format.
    #[error("{reason} (column {column}); the file is damaged, or has another format")]
    Invalid {
        /// What the parser reports.
        reason: String,
        /// Column in bytes, counted from 1.
        column: usize,
    },
}

/// Reads a JSON document of at most 256 MiB that consists mostly of numbers.
pub(crate) fn document<T: DeserializeOwned>(path: &Path) -> Result<T, ForeignError> {
    parse(path, &source::read_text(path)?)
}

/// Reads a JSON document of at most 32 MiB, whose lists and maps may take many times the memory of its text.
pub(crate) fn small_document<T: DeserializeOwned>(path: &Path) -> Result<T, ForeignError> {
    parse(path, &bounded::read(path, bounded::MAX_DOCUMENT)?)
}

fn parse<T: DeserializeOwned>(path: &Path, bytes: &[u8]) -> Result<T, ForeignError> {
    serde_json::from_slice(bytes).map_err(|error| invalid_in(path, &error, 0, bytes))
}

/// Reads the JSON object in line `line` of a file.
pub(crate) fn line<'a, T: Deserialize<'a>>(
    path: &Path,
    line: u64,
    text: &'a str,
) -> Result<T, ForeignError> {
    serde_json::from_str::<Object<T>>(text)
        .map(|Object(value)| value)
        .map_err(|error| invalid_in(path, &error, line - 1, text.as_bytes()))
}

/// Converts an error of serde_json in `text`, which `lines_before` lines of the file precede.
pub(crate) fn invalid_in(
    path: &Path,
    error: &serde_json::Error,
    lines_before: u64,
    text: &[u8],
) -> ForeignError {
    invalid(path, error, lines_before, non_finite(error, text))
}

/// Converts an error of serde_json in a file that was read as a stream. Reads the location of the error again.
pub(crate) fn invalid_in_stream(path: &Path, error: &serde_json::Error) -> ForeignError {
    let near = || {
        let mut reader = source::text_reader(path).ok()?;
        for _ in 1..error.line() {
            reader.skip_until(b'\n').ok()?;
        }
        let n_before = error.column().saturating_sub(2) as u64;
        io::copy(&mut reader.by_ref().take(n_before), &mut io::sink()).ok()?;
        let mut near = Vec::new();
        reader.take(16).read_to_end(&mut near).ok()?;
        Some(near)
    };
    invalid(path, error, 0, near().and_then(|near| non_finite_at(&near)))
}

fn invalid(
    path: &Path,
    error: &serde_json::Error,
    lines_before: u64,
    non_finite: Option<&str>,
) -> ForeignError {
    let line = lines_before + error.line().max(1) as u64;
    let column = error.column();
    let error = match non_finite {
        Some(value) => JsonError::NonFinite {
            value: value.to_owned(),
            column,
        },
        None => JsonError::Invalid {
            reason: reason(error),
            column,
        },
    };
    ForeignError::invalid(path, Location::Line(line), error)
}
