//! JSON Lines files of a run, which grow while the run is recorded.

use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;
use std::sync::Arc;

use moe_files::text::without_byte_order_mark;
use moe_gguf::content::Content;
use serde::de::DeserializeOwned;

use crate::bounded::{self, Lines, MAX_LINE};
use crate::error::Error;
use crate::fault::LineFault;
use crate::json::Object;

/// Maximum length of a last line that is checked, in bytes. Events and transfers have a few hundred.
const MAX_LAST_LINE: u64 = 64 << 10;
/// Bytes that are read to recognize the format of a file.
const SAMPLE_SIZE: u64 = 64 << 10;

/// Number of lines that are checked after an invalid first line. If one of them is valid, the file is damaged; otherwise it
/// has another format.
const MAX_LINES_AHEAD: usize = 8;

/// Reads the values of a file, which are objects. `expected` describes the file in errors: `the buffers.jsonl of a run`. Empty lines and an
/// incomplete last line are omitted.
///
/// # Errors
/// Those of [`visit`].
pub(crate) fn read<T: DeserializeOwned>(
    path: &Path,
    expected: &'static str,
    check: impl Fn(&T) -> Result<(), LineFault>,
) -> Result<Vec<T>, Error> {
    let mut values = Vec::new();
    visit(path, expected, check, |value| {
        values.push(value);
        Ok::<(), Error>(())
    })?;
    Ok(values)
}

/// Passes the values of a file to `visit`, one at a time. See [`read`] for `expected` and for lines that are omitted.
///
/// # Errors
/// [`Error::Line`] for a line that is not such a value or that `check` rejects; [`Error::OtherLines`] or
/// [`Error::OtherContent`] if none of the first lines is valid; [`Error::LineTooLong`], [`Error::Io`]; the error of `visit`.
pub(crate) fn visit<T: DeserializeOwned, E: From<Error>>(
    path: &Path,
    expected: &'static str,
    check: impl Fn(&T) -> Result<(), LineFault>,
    mut visit: impl FnMut(T) -> Result<(), E>,
) -> Result<(), E> {
    let mut lines = Lines::open(path, MAX_LINE)?;
    let mut n_values = 0u64;
    loop {
        let line = match lines.next_line() {
            Ok(Some(line)) => line,
            Ok(None) => return Ok(()),
            Err(error) if n_values == 0 => {
                return Err(other_content(path, expected)?.unwrap_or(error).into());
            }
            Err(error) => return Err(error.into()),
        };
        if line.trim_ascii().is_empty() {
            continue;
        }
        let is_complete = line.ends_with(b"\n");
        let value = serde_json::from_slice::<Object<T>>(line)
            .map(|Object(value)| value)
            .map_err(|error| LineFault::Json(Arc::new(error)));
        let ends_within = matches!(&value, Err(LineFault::Json(error)) if error.is_eof());
        let may_be_cut = !is_complete && (ends_within || n_values > 0);
        let fault = match value.and_then(|value| check(&value).map(|()| value)) {
            Ok(value) => {
                n_values += 1;
                visit(value)?;
                continue;
            }
            Err(_) if may_be_cut => return Ok(()),
            Err(fault) => fault,
        };
        let (path, line) = (path.to_owned(), lines.number());
        let is_value = |line: &[u8]| serde_json::from_slice::<Object<T>>(line).is_ok();
        let mut next_is_value = || matches!(lines.next_line(), Ok(Some(line)) if is_value(line));
        let is_damaged = n_values > 0
            || !matches!(fault, LineFault::Json(_))
            || (0..MAX_LINES_AHEAD).any(|_| next_is_value());
        if is_damaged {
            return Err(Error::Line { path, line, fault }.into());
        }
        let error = other_content(&path, expected)?.unwrap_or(Error::OtherLines {
            path,
            expected,
            line,
            fault,
        });
        return Err(error.into());
    }
}

/// The error if the file has another format that is known.
fn other_content(path: &Path, expected: &'static str) -> Result<Option<Error>, Error> {
    let mut sample = Vec::new();
    bounded::open(path)?
        .take(SAMPLE_SIZE)
        .read_to_end(&mut sample)
        .map_err(Error::io("read", path))?;
    Ok(Content::of(&sample).map(|content| Error::OtherContent {
        path: path.to_owned(),
        expected,
        content,
    }))
}

/// A warning if the last line of the file is incomplete; `None` if the file does not exist.
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
    // A last line without a newline may be complete: other programs omit the newline.
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
