//! Files of a run that hold one JSON value a line and grow while it is recorded.

use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;
use std::sync::Arc;

use moe_files::text::without_byte_order_mark;
use serde::de::DeserializeOwned;

use crate::bounded::{self, Lines, MAX_LINE};
use crate::error::Error;
use crate::fault::LineFault;

/// Bytes of a last line that are looked at; events and transfers have some hundred.
const MAX_LAST_LINE: u64 = 64 << 10;

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

/// A remark about a file whose last line its recorder did not finish; nothing where the file does not exist.
///
/// # Errors
/// The file cannot be read, or is not a regular file.
pub(crate) fn truncation(path: &Path) -> Result<Option<String>, Error> {
    let mut file = match bounded::open(path) {
        Err(Error::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
            return Ok(None);
        }
        file => file?,
    };
    let size = file.metadata().map_err(Error::io("open", path))?.len();
    let start = size.saturating_sub(MAX_LAST_LINE);
    let mut tail = Vec::new();
    file.seek(SeekFrom::Start(start))
        .and_then(|_| file.take(MAX_LAST_LINE).read_to_end(&mut tail))
        .map_err(Error::io("read", path))?;
    let last = tail
        .rsplit(|&byte| byte == b'\n')
        .next()
        .unwrap_or_default();
    // Other programs end a file without a newline.
    let json = without_byte_order_mark(last);
    let is_complete = last.trim_ascii().is_empty()
        || serde_json::from_slice::<serde::de::IgnoredAny>(json).is_ok();
    Ok((!is_complete).then(|| {
        format!(
            "{} is truncated: its last line, at byte {}, is incomplete and is not used",
            path.display(),
            size - last.len() as u64
        )
    }))
}
