//! Reads JSON documents in this program's own formats. Errors contain the file, the line and column, and advice.

use std::path::Path;

use anyhow::anyhow;
use moe_placement::json::{self, JsonError};
use moe_trace::json::reason_with_location;
use moe_trace::{Error, bounded};
use serde::de::DeserializeOwned;

/// Reads a document. Errors of its contents end with `advice`, which describes the format.
pub fn read<T: DeserializeOwned>(path: &Path, advice: &str) -> anyhow::Result<T> {
    let text = bounded::read_json(path).map_err(|error| match error {
        Error::Io { .. } => error.into(),
        error => anyhow!("{error}; {advice}"),
    })?;
    parse(&text).map_err(|error| anyhow!("{}: {error}; {advice}", path.display()))
}

/// Parses the text of a document, in which no object contains a key twice.
pub fn parse<T: DeserializeOwned>(text: &str) -> anyhow::Result<T> {
    json::parse_unique(text).map_err(describe)
}

/// Describes an error with its line and column.
pub fn describe(error: JsonError) -> anyhow::Error {
    match error {
        JsonError::Invalid(error) => anyhow!(reason_with_location(&error)),
        error => error.into(),
    }
}
