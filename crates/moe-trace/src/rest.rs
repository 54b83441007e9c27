//! `trace-rest.bin.zst`: the records that a recorder compressed because the disk could not keep up.
//!
//! It is a zstd file. A skippable frame contains the number of bytes of `trace.bin` that precede its records; each of the other
//! frames contains a block of records, with a checksum. At the end of the run, the records are appended to `trace.bin`, and the
//! file is removed. If the recorder is killed before, the file remains, and [`restore`] returns the complete trace.

use std::fs::File;
use std::io::{self, BufReader, Read, Write};
use std::path::Path;

use serde::{Deserialize, Serialize};
use zstd::stream::read::Decoder;

use crate::error::Error;
use crate::record::RECORD_SIZE;
use crate::run::TRACE_FILE;

/// Name of the file in a run directory.
pub const REST_FILE: &str = "trace-rest.bin.zst";

/// Start of a skippable frame with 16 bytes (RFC 8878, section 3.1.2), and of those bytes.
pub(crate) const HEADER: [u8; 16] = *b"\x50\x2a\x4d\x18\x10\0\0\0moetrace";
pub(crate) const HEADER_SIZE: usize = HEADER.len() + size_of::<u64>();
const BUFFER_SIZE: usize = 256 << 10;

/// Records that a recorder compressed, and appended to `trace.bin` at the end of the run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Expansion {
    /// Size of these records in bytes.
    pub bytes: u64,
    /// Duration of the decompression, in seconds.
    pub seconds: f64,
}

/// If a recorder was killed before it had expanded the rest of `trace`, or is still recording, returns an unnamed temporary file
/// with all records.
///
/// # Errors
/// [`Error::Io`] and [`Error::Expand`].
pub(crate) fn restore(trace: &Path) -> Result<Option<File>, Error> {
    if trace.file_name().is_none_or(|name| name != TRACE_FILE) {
        return Ok(None);
    }
    let path = trace.with_file_name(REST_FILE);
    // Opened before the trace: if a recorder removes the file meanwhile, its records are in the trace.
    let (offset, rest) = match open(&path) {
        Ok(Some(opened)) => opened,
        Ok(None) => return Ok(None),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(Error::io("read", &path)(error)),
    };
    let first = crate::bounded::open(trace)?;
    let expanded = || -> io::Result<File> {
        let mut file = tempfile::tempfile()?;
        let copied = io::copy(&mut first.take(offset), &mut file)?;
        // A trace that was truncated by a power loss ends where the first record is missing.
        if copied == offset {
            copy_records(rest, &mut file)?;
        }
        Ok(file)
    };
    expanded().map(Some).map_err(|source| Error::Expand {
        path,
        source: source.into(),
    })
}

/// The number of bytes of `trace.bin` before the records of an open file, and a reader of the records. `None` for a file that
/// this crate did not write, such as one that a user has compressed.
pub(crate) fn open(path: &Path) -> io::Result<Option<(u64, Decoder<'static, BufReader<File>>)>> {
    // Opening a FIFO would block.
    if !std::fs::metadata(path)?.is_file() {
        return Ok(None);
    }
    let mut file = File::open(path)?;
    let mut header = [0; HEADER_SIZE];
    match file.read_exact(&mut header) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        read => read?,
    }
    let (start, offset) = header.split_at(HEADER.len());
    let offset = offset.try_into().map(u64::from_le_bytes);
    match offset {
        Ok(offset) if start == HEADER => Ok(Some((offset, Decoder::new(file)?))),
        _ => Ok(None),
    }
}

/// Copies all complete records. A frame that is incomplete, because the recorder was killed, is the last one. Returns the number
/// of bytes.
pub(crate) fn copy_records(mut from: impl Read, to: &mut impl Write) -> io::Result<u64> {
    let mut buffer = vec![0; BUFFER_SIZE];
    let (mut filled, mut total) = (0, 0);
    loop {
        let n = match from.read(&mut buffer[filled..]) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => 0,
            read => read?,
        };
        filled += n;
        let complete = filled - filled % RECORD_SIZE;
        to.write_all(&buffer[..complete])?;
        total += complete as u64;
        buffer.copy_within(complete..filled, 0);
        filled -= complete;
        if n == 0 {
            return Ok(total);
        }
    }
}
