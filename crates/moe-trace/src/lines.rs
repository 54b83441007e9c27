//! Files of a run that hold one JSON value a line and grow while it is recorded.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::bounded::{Lines, MAX_LINE};
use crate::error::Error;
use crate::fault::LineFault;

/// Reads the values of a file. Empty lines, and a last line that its recorder did not finish, are left out.
///
/// # Errors
/// [`Error::Line`] for a line that is no such value or that `check` refuses, [`Error::LineTooLong`], [`Error::Io`].
pub(crate) fn read<T: DeserializeOwned>(
    path: &Path,
    check: impl Fn(&T) -> Result<(), LineFault>,
) -> Result<Vec<T>, Error> {
    let mut lines = Lines::open(path, MAX_LINE)?;
    let mut values = Vec::new();
    while let Some(line) = lines.next_line()? {
        if line.trim_ascii().is_empty() {
            continue;
        }
        let is_complete = line.ends_with(b"\n");
        let value = serde_json::from_slice(line).map_err(|error| LineFault::Json(Arc::new(error)));
        match value.and_then(|value| check(&value).map(|()| value)) {
            Ok(value) => values.push(value),
            Err(_) if !is_complete => break,
            Err(fault) => {
                return Err(Error::Line {
                    path: path.to_owned(),
                    line: lines.number(),
                    fault,
                });
            }
        }
    }
    Ok(values)
}

/// Adds values to a file, at once; `what` one of them is.
pub(crate) fn append<T: Serialize>(
    file: &mut File,
    path: &Path,
    what: &'static str,
    values: &[T],
) -> Result<(), Error> {
    let mut lines = Vec::new();
    for value in values {
        serde_json::to_writer(&mut lines, value).map_err(Error::json(what, path))?;
        lines.push(b'\n');
    }
    file.write_all(&lines).map_err(Error::writing(path))
}
