//! JSON documents and lines.

use std::path::Path;

use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::error::{At, ForeignError};
use super::source;

/// Reads a JSON document of a known shape.
pub fn document<T: DeserializeOwned>(path: &Path) -> Result<T, ForeignError> {
    let bytes = source::read_whole(path)?;
    serde_json::from_slice(&bytes).map_err(|error| invalid(path, &error, 0))
}

/// Reads the JSON of one line.
pub fn line<'a, T: Deserialize<'a>>(
    path: &Path,
    line: u64,
    text: &'a str,
) -> Result<T, ForeignError> {
    serde_json::from_str(text).map_err(|error| invalid(path, &error, line - 1))
}

/// What serde_json says, with the line in the file; `lines_before` are those before the text that it read.
pub(super) fn invalid(path: &Path, error: &serde_json::Error, lines_before: u64) -> ForeignError {
    let text = error.to_string();
    let place = format!(" at line {} column {}", error.line(), error.column());
    let reason = text.strip_suffix(&place).unwrap_or(&text);
    let line = lines_before + error.line().max(1) as u64;
    let reason = format!(
        "{reason} (column {}); the file is damaged, or of another format",
        error.column()
    );
    ForeignError::invalid(path, At::Line(line), reason)
}
