//! Writing `trace-rest.bin.zst`, see [`rest`](crate::rest).

use std::fs::{self, File};
use std::io::{self, Seek, SeekFrom, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use zstd::bulk::Compressor;
use zstd::zstd_safe::CParameter;

use crate::rest::{Expansion, HEADER, HEADER_SIZE, copy_records, open};

/// The fastest level for records: more than 1 GB/s on one core, to 1/34 of the size.
const LEVEL: i32 = -1;

/// Writes blocks of records to the file.
pub(crate) struct RestWriter {
    file: File,
    compressor: Compressor<'static>,
    /// Size of the complete frames in bytes.
    len: u64,
}

impl RestWriter {
    /// Creates the file. `offset` is the size of `trace.bin` in bytes.
    pub(crate) fn create(path: &Path, offset: u64) -> io::Result<RestWriter> {
        let mut compressor = Compressor::new(LEVEL)?;
        compressor.set_parameter(CParameter::ChecksumFlag(true))?;
        let mut file = File::create_new(path)?;
        let header = [HEADER.as_slice(), &offset.to_le_bytes()].concat();
        if let Err(error) = file.write_all(&header) {
            drop(file);
            // The error of the write is more important than that of the removal.
            let _ = fs::remove_file(path);
            return Err(error);
        }
        Ok(RestWriter {
            file,
            compressor,
            len: HEADER_SIZE as u64,
        })
    }

    /// Appends a frame, or nothing after an error.
    pub(crate) fn write(&mut self, records: &[u8]) -> io::Result<()> {
        let frame = self.compressor.compress(records)?;
        if let Err(error) = self.file.write_all(&frame) {
            let _ = self.file.set_len(self.len);
            return Err(error);
        }
        self.len += frame.len() as u64;
        Ok(())
    }
}

/// Appends the records of the file at `path` to `trace`, and removes the file. After an error, `trace` is as before.
pub(crate) fn expand(path: &Path, trace: &mut File) -> io::Result<Expansion> {
    let start = Instant::now();
    let (offset, mut rest) = open(path)?
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "its header is damaged"))?;
    let appended = trace
        .seek(SeekFrom::Start(offset))
        .and_then(|_| copy_records(&mut rest, trace))
        .and_then(|copied| copied.damage.map_or(Ok(copied.bytes), Err));
    match appended.and_then(|bytes| fs::remove_file(path).map(|()| bytes)) {
        Ok(bytes) => Ok(Expansion {
            bytes,
            seconds: start.elapsed().max(Duration::from_nanos(1)).as_secs_f64(),
        }),
        Err(error) => {
            let _ = trace.set_len(offset);
            Err(error)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use crate::record::RECORD_SIZE;
    use crate::rest::{REST_FILE, restore};
    use crate::run::TRACE_FILE;

    use super::*;

    fn block(n: usize, value: u8) -> Vec<u8> {
        (0..n * RECORD_SIZE)
            .map(|i| if i % 8 == 0 { value } else { (i >> 10) as u8 })
            .collect()
    }

    /// A run directory with `n` bytes of `trace.bin`, and two blocks in the rest.
    fn write(dir: &Path, n: usize) -> (Vec<u8>, RestWriter) {
        let first = block(n / RECORD_SIZE, 1);
        fs::write(dir.join(TRACE_FILE), &first).unwrap();
        let mut rest = RestWriter::create(&dir.join(REST_FILE), n as u64).unwrap();
        let blocks = [block(3, 2), block(5, 3)];
        for block in &blocks {
            rest.write(block).unwrap();
        }
        ([first, blocks.concat()].concat(), rest)
    }

    /// The records, and the note about those that are not used.
    fn restored_with_note(dir: &Path) -> Option<(Vec<u8>, Option<String>)> {
        let mut restored = restore(&dir.join(TRACE_FILE)).unwrap()?;
        let mut bytes = Vec::new();
        restored.file.seek(SeekFrom::Start(0)).unwrap();
        restored.file.read_to_end(&mut bytes).unwrap();
        Some((bytes, restored.note))
    }

    fn restored(dir: &Path) -> Option<Vec<u8>> {
        let (bytes, note) = restored_with_note(dir)?;
        assert_eq!(note, None);
        Some(bytes)
    }

    #[test]
    fn restores_and_expands() {
        let dir = tempfile::tempdir().unwrap();
        let (expected, _) = write(dir.path(), 2 * RECORD_SIZE);
        assert_eq!(restored(dir.path()).unwrap(), expected);
        let trace = dir.path().join(TRACE_FILE);
        let mut file = File::options().write(true).open(&trace).unwrap();
        let expansion = expand(&dir.path().join(REST_FILE), &mut file).unwrap();
        assert_eq!(expansion.bytes, 8 * RECORD_SIZE as u64);
        assert!(expansion.seconds > 0.0);
        assert_eq!(fs::read(&trace).unwrap(), expected);
        assert_eq!(restored(dir.path()), None);
    }

    /// A kill while the records are being appended.
    #[test]
    fn ignores_records_that_were_appended_already() {
        let dir = tempfile::tempdir().unwrap();
        let (expected, _) = write(dir.path(), 2 * RECORD_SIZE);
        fs::write(dir.path().join(TRACE_FILE), &expected[..4 * RECORD_SIZE]).unwrap();
        assert_eq!(restored(dir.path()).unwrap(), expected);
    }

    /// A kill or a power loss at any byte of the file.
    #[test]
    fn restores_the_complete_records_of_a_truncated_file() {
        let dir = tempfile::tempdir().unwrap();
        let (expected, _) = write(dir.path(), 2 * RECORD_SIZE);
        let path = dir.path().join(REST_FILE);
        let bytes = fs::read(&path).unwrap();
        let mut n_records = Vec::new();
        for len in 0..=bytes.len() {
            fs::write(&path, &bytes[..len]).unwrap();
            let found = restored_with_note(dir.path());
            assert_eq!(found.is_some(), len > 0);
            let first = || (expected[..2 * RECORD_SIZE].to_vec(), None);
            let (found, note) = found.unwrap_or_else(first);
            assert_eq!(note.is_some(), (1..HEADER_SIZE).contains(&len), "{len}");
            assert!(expected.starts_with(&found), "{len}");
            n_records.push(found.len() / RECORD_SIZE);
        }
        assert!(n_records.is_sorted());
        assert_eq!((n_records[0], n_records[bytes.len()]), (2, 10));
    }

    #[test]
    fn uses_the_records_before_damage() {
        let dir = tempfile::tempdir().unwrap();
        let (expected, _) = write(dir.path(), 2 * RECORD_SIZE);
        let path = dir.path().join(REST_FILE);
        let mut bytes = fs::read(&path).unwrap();
        // Within the checksum of the last frame.
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(&path, bytes).unwrap();
        let (found, note) = restored_with_note(dir.path()).unwrap();
        assert_eq!(found, expected[..5 * RECORD_SIZE]);
        let note = note.unwrap();
        assert!(
            note.contains("the 3 records in it before the damage"),
            "{note}"
        );
        let mut trace = File::options()
            .write(true)
            .open(dir.path().join(TRACE_FILE))
            .unwrap();
        assert!(expand(&path, &mut trace).is_err());
        assert_eq!(trace.metadata().unwrap().len(), 2 * RECORD_SIZE as u64);
        assert!(path.exists());
    }

    #[test]
    fn ignores_zeros_after_the_complete_frames() {
        let dir = tempfile::tempdir().unwrap();
        let (expected, _) = write(dir.path(), 2 * RECORD_SIZE);
        let path = dir.path().join(REST_FILE);
        let mut bytes = fs::read(&path).unwrap();
        for n in [1, 4, 100, 1 << 20] {
            bytes.resize(bytes.len() + n, 0);
            fs::write(&path, &bytes).unwrap();
            assert_eq!(restored(dir.path()).unwrap(), expected, "{n}");
        }
    }

    /// Readers end at a timestamp of 0, so that nothing after it is decompressed: 1 GiB of zeros has 32 kB.
    #[test]
    fn ends_at_the_first_record_without_a_timestamp() {
        let dir = tempfile::tempdir().unwrap();
        let (expected, mut rest) = write(dir.path(), 2 * RECORD_SIZE);
        let last = block(1, 4);
        let zeros = vec![0; 8 << 20];
        rest.write(&[last.as_slice(), zeros.as_slice()].concat())
            .unwrap();
        rest.write(&block(1, 5)).unwrap();
        assert_eq!(restored(dir.path()).unwrap(), [expected, last].concat());
    }

    /// A damaged header, or a trace that a power loss has truncated.
    #[test]
    fn does_not_use_records_that_do_not_follow_the_trace() {
        const DAMAGED: &str = "its header is damaged";
        let dir = tempfile::tempdir().unwrap();
        let (expected, _) = write(dir.path(), 2 * RECORD_SIZE);
        let path = dir.path().join(REST_FILE);
        let bytes = fs::read(&path).unwrap();
        let size = RECORD_SIZE as u64;
        for (offset, reason) in [
            (0, DAMAGED),
            (size, DAMAGED),
            (2 * size - 1, DAMAGED),
            (3 * size, "trace.bin ends before the first of its records"),
            (u64::MAX - u64::MAX % size, "trace.bin ends before"),
        ] {
            let mut damaged = bytes.clone();
            damaged[HEADER.len()..HEADER_SIZE].copy_from_slice(&offset.to_le_bytes());
            fs::write(&path, damaged).unwrap();
            let (found, note) = restored_with_note(dir.path()).unwrap();
            assert_eq!(found, expected[..2 * RECORD_SIZE], "{offset}");
            let note = note.unwrap();
            assert!(note.contains(reason), "{offset}: {note}");
        }
        fs::write(&path, bytes).unwrap();
        let trace = dir.path().join(TRACE_FILE);
        fs::write(&trace, [block(1, 1), vec![0; RECORD_SIZE]].concat()).unwrap();
        let (_, note) = restored_with_note(dir.path()).unwrap();
        assert!(note.unwrap().contains("trace.bin ends before"));
    }

    /// A user may compress a trace, or store other files next to it.
    #[test]
    fn ignores_other_files() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(TRACE_FILE), block(2, 1)).unwrap();
        for other in [b"".as_slice(), &zstd::encode_all(&*block(2, 1), 1).unwrap()] {
            fs::write(dir.path().join(REST_FILE), other).unwrap();
            assert_eq!(restored(dir.path()), None);
        }
        for damaged in [b"text".as_slice(), &[0; HEADER_SIZE]] {
            fs::write(dir.path().join(REST_FILE), damaged).unwrap();
            let (found, note) = restored_with_note(dir.path()).unwrap();
            assert_eq!(found, block(2, 1));
            assert!(note.unwrap().contains("its header is damaged"));
        }
        fs::remove_file(dir.path().join(REST_FILE)).unwrap();
        fs::create_dir(dir.path().join(REST_FILE)).unwrap();
        assert_eq!(restored(dir.path()), None);
    }

    #[cfg(unix)]
    #[test]
    fn ignores_a_fifo() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(TRACE_FILE), block(2, 1)).unwrap();
        let made = std::process::Command::new("mkfifo")
            .arg(dir.path().join(REST_FILE))
            .status();
        assert!(made.unwrap().success());
        assert_eq!(restored(dir.path()), None);
    }

    /// The program zstd must be able to read the file.
    #[test]
    fn is_a_zstd_file() {
        let dir = tempfile::tempdir().unwrap();
        let (expected, _) = write(dir.path(), 2 * RECORD_SIZE);
        let file = File::open(dir.path().join(REST_FILE)).unwrap();
        assert_eq!(zstd::decode_all(file).unwrap(), expected[2 * RECORD_SIZE..]);
    }
}
