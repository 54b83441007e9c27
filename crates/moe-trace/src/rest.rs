//! `trace-rest.bin.zst`: the records that a recorder compressed because the disk could not keep up.
//!
//! It is a zstd file. A skippable frame contains the number of bytes of `trace.bin` that precede its records; each of the other
//! frames contains a block of records, with a checksum. At the end of the run, the records are appended to `trace.bin`, and the
//! file is removed. If the recorder is killed before, the file remains, and [`restore`] returns the complete trace.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::path::Path;

use moe_files::text::counted;
use serde::{Deserialize, Serialize};
use zerocopy::FromBytes;
use zstd::stream::raw::{Decoder, Operation};

use crate::error::Error;
use crate::record::{RECORD_SIZE, TensorAccessLog};
use crate::run::TRACE_FILE;

/// Name of the file in a run directory.
pub const REST_FILE: &str = "trace-rest.bin.zst";

/// Start of a skippable frame with 16 bytes (RFC 8878, section 3.1.2), and of those bytes.
pub(crate) const HEADER: [u8; 16] = *b"\x50\x2a\x4d\x18\x10\0\0\0moetrace";
/// Start of a compressed file without this header.
const ZSTD_FRAME: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];
pub(crate) const HEADER_SIZE: usize = HEADER.len() + size_of::<u64>();
const BUFFER_SIZE: usize = 256 << 10;
/// The part of a frame that is kept in memory. The frames of the recorder are smaller.
const MAX_FRAME_SIZE: usize = 64 << 20;

/// Records that a recorder compressed, and appended to `trace.bin` at the end of the run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Expansion {
    /// Size of these records in bytes.
    pub bytes: u64,
    /// Duration of the decompression, in seconds.
    pub seconds: f64,
}

/// The trace of a recorder that was killed before it had expanded the rest, or is still recording.
pub(crate) struct Restored {
    /// An unnamed temporary file with all records, or `trace.bin` if those of the rest cannot be used.
    pub(crate) file: File,
    /// Which records of the rest are not used, and why.
    pub(crate) note: Option<String>,
}

/// If `trace` has a rest, returns its records followed by those of the rest.
///
/// # Errors
/// [`Error::Io`] and [`Error::Expand`].
pub(crate) fn restore(trace: &Path) -> Result<Option<Restored>, Error> {
    if trace.file_name().is_none_or(|name| name != TRACE_FILE) {
        return Ok(None);
    }
    let path = trace.with_file_name(REST_FILE);
    // Opened before the trace: if a recorder removes the file meanwhile, its records are in the trace.
    let (offset, rest) = match open(&path) {
        Ok(Some(opened)) => opened,
        Ok(None) => return Ok(None),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) if error.kind() == io::ErrorKind::InvalidData => {
            return Ok(Some(without_rest(
                crate::bounded::open(trace)?,
                &path,
                DAMAGED,
            )));
        }
        Err(error) => return Err(Error::io("read", &path)(error)),
    };
    let first = crate::bounded::open(trace)?;
    let restored = join(first, offset, rest, &path);
    restored.map(Some).map_err(|source| Error::Expand {
        path,
        source: source.into(),
    })
}

const DAMAGED: &str = "its header is damaged";

/// `trace.bin` alone.
fn without_rest(file: File, path: &Path, reason: &str) -> Restored {
    let note = format!(
        "{}: {reason}; the records in it are not used",
        path.display()
    );
    let note = Some(note);
    Restored { file, note }
}

/// Returns the first `offset` bytes of a trace followed by the records of the rest at `path`.
fn join(
    mut first: File,
    offset: u64,
    mut rest: BufReader<File>,
    path: &Path,
) -> io::Result<Restored> {
    let size = RECORD_SIZE as u64;
    if !offset.is_multiple_of(size) {
        return Ok(without_rest(first, path, DAMAGED));
    }
    // A trace that was truncated by a power loss ends where the first record is missing.
    if offset > 0 && record_at(&mut first, offset - size)?.is_none() {
        let reason = "trace.bin ends before the first of its records";
        return Ok(without_rest(first, path, reason));
    }
    let next = record_at(&mut first, offset)?;
    first.seek(SeekFrom::Start(0))?;
    let mut file = tempfile::tempfile()?;
    io::copy(&mut (&first).take(offset), &mut file)?;
    let copied = copy_records(&mut rest, &mut file)?;
    // The recorder was killed while it appended the same records to the trace.
    if next.is_some() && copied.bytes > 0 && next != record_at(&mut file, offset)? {
        return Ok(without_rest(first, path, DAMAGED));
    }
    let note = copied.damage.map(|error| {
        format!(
            "{} is damaged ({error}); the {} in it before the damage are used",
            path.display(),
            counted(copied.bytes / size, "record")
        )
    });
    Ok(Restored { file, note })
}

/// The record at an offset of a file, unless its timestamp is 0 or the file ends before the end of the record.
fn record_at(file: &mut File, offset: u64) -> io::Result<Option<[u8; RECORD_SIZE]>> {
    // A damaged header may contain an offset at which no file can be read.
    if file.metadata()?.len() < offset {
        return Ok(None);
    }
    file.seek(SeekFrom::Start(offset))?;
    let mut record = [0; RECORD_SIZE];
    match file.read_exact(&mut record) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        read => read?,
    }
    Ok(Some(record).filter(|record| !ends_trace(record)))
}

/// Whether readers end at a record, because its timestamp is 0.
fn ends_trace(record: &[u8; RECORD_SIZE]) -> bool {
    TensorAccessLog::ref_from_bytes(record).is_ok_and(|record| record.timestamp_ns.get() == 0)
}

/// The number of bytes of `trace.bin` before the records of an open file, and a reader of its frames. `None` for an empty file, and
/// for a trace that a user has compressed.
///
/// # Errors
/// [`io::ErrorKind::InvalidData`] for a damaged header.
pub(crate) fn open(path: &Path) -> io::Result<Option<(u64, BufReader<File>)>> {
    // Opening a FIFO would block.
    if !std::fs::metadata(path)?.is_file() {
        return Ok(None);
    }
    let mut file = File::open(path)?;
    let mut header = Vec::with_capacity(HEADER_SIZE);
    (&mut file)
        .take(HEADER_SIZE as u64)
        .read_to_end(&mut header)?;
    if header.is_empty() || header.starts_with(&ZSTD_FRAME) {
        return Ok(None);
    }
    let offset = header.strip_prefix(&HEADER);
    let offset = offset.and_then(|offset| offset.try_into().ok());
    let offset = offset.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, DAMAGED))?;
    let offset = u64::from_le_bytes(offset);
    Ok(Some((offset, BufReader::with_capacity(BUFFER_SIZE, file))))
}

/// What [`copy_records`] has copied.
pub(crate) struct Copied {
    /// Number of bytes.
    pub(crate) bytes: u64,
    /// Why the following frames cannot be decompressed; `None` if there are none.
    pub(crate) damage: Option<io::Error>,
}

/// Copies the records of all complete frames, up to the first record with timestamp 0. An incomplete frame at the end of the file,
/// because the recorder was killed, and zeros there, after a power loss, are ignored.
pub(crate) fn copy_records(from: &mut impl BufRead, to: &mut impl Write) -> io::Result<Copied> {
    let mut decoder = Decoder::new()?;
    let mut buffer = vec![0u8; BUFFER_SIZE];
    // The bytes of the current frame, after an incomplete record of the previous ones. They are copied at the end of the frame,
    // where zstd has compared its checksum.
    let mut frame: Vec<u8> = Vec::new();
    let (mut checked, mut bytes) = (0, 0);
    loop {
        let input = from.fill_buf()?;
        let is_end = input.is_empty();
        let step = match decoder.run_on_buffers(input, &mut buffer) {
            Ok(step) => step,
            Err(error) => {
                let damage = (!is_zeros(from)?).then_some(error);
                return Ok(Copied { bytes, damage });
            }
        };
        from.consume(step.bytes_read);
        if is_end && step.bytes_written == 0 {
            let damage = None;
            return Ok(Copied { bytes, damage });
        }
        frame.extend_from_slice(&buffer[..step.bytes_written]);
        let (records, _) = frame[checked..].as_chunks::<RECORD_SIZE>();
        let end = records.iter().position(ends_trace);
        checked += end.unwrap_or(records.len()) * RECORD_SIZE;
        if end.is_some() || step.remaining == 0 || frame.len() >= MAX_FRAME_SIZE {
            to.write_all(&frame[..checked])?;
            bytes += checked as u64;
            frame.drain(..checked);
            checked = 0;
        }
        if end.is_some() {
            let damage = None;
            return Ok(Copied { bytes, damage });
        }
    }
}

/// Whether all remaining bytes are 0.
fn is_zeros(from: &mut impl BufRead) -> io::Result<bool> {
    loop {
        let bytes = from.fill_buf()?;
        if bytes.is_empty() {
            return Ok(true);
        }
        if bytes.iter().any(|&byte| byte != 0) {
            return Ok(false);
        }
        let n = bytes.len();
        from.consume(n);
    }
}
