//! JSON documents and lines.

use std::io::{self, BufRead, Read};
use std::path::Path;

use moe_placement::json::{non_finite, non_finite_at};
use moe_trace::bounded;
use moe_trace::json::reason;
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

/// What serde_json says of `text`, with the line in the file; `lines_before` are those before the text.
pub(crate) fn invalid_in(
    path: &Path,
    error: &serde_json::Error,
    lines_before: u64,
    text: &[u8],
) -> ForeignError {
    invalid(path, error, lines_before, non_finite(error, text))
}

/// What serde_json says of a file that it read as a stream. Reads the place of the error again.
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
    let reason = match non_finite {
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
