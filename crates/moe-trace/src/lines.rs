//! Files of a run that hold one JSON value a line and grow while it is recorded.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::Error;

/// Reads the values of a file. Empty lines, and a last line that its recorder did not finish, are left out.
///
/// # Errors
/// [`Error::Line`] for a line that is no such value or that `check` refuses, [`Error::Io`].
pub(crate) fn read<T: DeserializeOwned>(
    path: &Path,
    check: impl Fn(&T) -> Result<(), String>,
) -> Result<Vec<T>, Error> {
    let mut file = BufReader::new(File::open(path).map_err(Error::io("open", path))?);
    let mut values = Vec::new();
    let mut line = Vec::new();
    for number in 1.. {
        line.clear();
        let n = file
            .read_until(b'\n', &mut line)
            .map_err(Error::io("read", path))?;
        if n == 0 {
            break;
        }
        let is_whole = line.ends_with(b"\n");
        if line.trim_ascii().is_empty() {
            continue;
        }
        let value = serde_json::from_slice(&line).map_err(|error| error.to_string());
        match value.and_then(|value| check(&value).map(|()| value)) {
            Ok(value) => values.push(value),
            Err(_) if !is_whole => break,
            Err(reason) => {
                return Err(Error::Line {
                    path: path.to_owned(),
                    line: number,
                    reason,
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
        serde_json::to_writer(&mut lines, value).map_err(|error| Error::Json {
            path: path.to_owned(),
            what,
            reason: error.to_string(),
        })?;
        lines.push(b'\n');
    }
    file.write_all(&lines).map_err(Error::writing(path))
}
