//! Reading a memory-mapped `trace.bin`.

use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};

use moe_files::MappedFile;
use moe_gguf::content::Content;
use zerocopy::FromBytes;

use crate::bounded;
use crate::error::Error;
use crate::operations::Operations;
use crate::record::{RECORD_SIZE, TensorAccessLog};
use crate::rest;

/// Whether `sample`, the first bytes of a file, is the start of a trace: its first record is plausible, and so are at least three
/// quarters of the records that are not all zeros. The other records may be damaged.
pub fn is_trace(sample: &[u8]) -> bool {
    if Content::of(sample).is_some() {
        return false;
    }
    let (records, _) = sample.as_chunks::<RECORD_SIZE>();
    let is_plausible = |bytes: &[u8; RECORD_SIZE]| {
        TensorAccessLog::ref_from_bytes(bytes).is_ok_and(TensorAccessLog::is_plausible)
    };
    let used = records.iter().filter(|bytes| **bytes != [0; RECORD_SIZE]);
    let n_plausible = used.clone().filter(|bytes| is_plausible(bytes)).count();
    records.first().is_some_and(is_plausible) && 4 * n_plausible >= 3 * used.count()
}

/// A memory-mapped trace. Its records are borrowed from the mapping.
#[derive(Debug)]
pub struct Trace {
    path: PathBuf,
    map: MappedFile,
    records: OnceLock<usize>,
    position: Arc<AtomicU64>,
    rest_note: Option<String>,
}

impl Trace {
    /// Maps `path`, which must be a regular file. Does not check the contents; an invalid record is an error when it is used.
    ///
    /// If a file [`REST_FILE`](crate::REST_FILE) with further records exists next to it, all records are copied to a temporary file.
    ///
    /// # Errors
    /// [`Error::Io`], also if the file is not regular; [`Error::Expand`].
    pub fn open(path: impl AsRef<Path>) -> Result<Self, Error> {
        let path = path.as_ref();
        match rest::restore(path)? {
            Some(restored) => Ok(Self {
                rest_note: restored.note,
                ..Self::from_file(path, &restored.file)?
            }),
            None => Self::from_file(path, &bounded::open(path)?),
        }
    }

    /// Maps an open file. `path` is its name in error messages.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn from_file(path: &Path, file: &File) -> Result<Self, Error> {
        Ok(Self {
            path: path.to_owned(),
            map: MappedFile::new(file, path).map_err(Error::io("map", path))?,
            records: OnceLock::new(),
            position: Arc::default(),
            rest_note: None,
        })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Which records of the file [`REST_FILE`](crate::REST_FILE) are not used, and why. `None` if all are used, or without such a file.
    pub fn rest_note(&self) -> Option<&str> {
        self.rest_note.as_deref()
    }

    /// The records before the first one with timestamp 0.
    ///
    /// The first call reads every timestamp; [`Trace::operations`] does not.
    pub fn records(&self) -> &[TensorAccessLog] {
        let all = self.all_records();
        let n = *self.records.get_or_init(|| {
            all.iter()
                .position(|record| record.timestamp_ns.get() == 0)
                .unwrap_or(all.len())
        });
        &all[..n]
    }

    /// The last of [`Trace::records`]. The timestamps are read only if the file ends with zeros.
    pub fn last_record(&self) -> Option<&TensorAccessLog> {
        let last = self.all_records().last()?;
        if last.timestamp_ns.get() == 0 {
            return self.records().last();
        }
        Some(last)
    }

    /// Stores the number of records before the first timestamp 0, which the caller knows after reading all operations.
    pub(crate) fn keep_record_count(&self, n: usize) {
        // A stored number is the same.
        let _ = self.records.set(n);
    }

    /// The operations in order, up to the first timestamp 0.
    pub fn operations(&self) -> Operations<'_> {
        Operations::new(self.all_records()).reporting_to(&self.position)
    }

    /// The index of the current record of the newest iterator over operations, for progress reports of another thread.
    pub fn position(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.position)
    }

    /// The operations in `records`, whose first must be the first record of an operation. Empty if the trace is shorter.
    pub fn operations_in(&self, records: Range<u64>) -> Operations<'_> {
        let index = |record| usize::try_from(record).unwrap_or(usize::MAX);
        let some = self
            .all_records()
            .get(index(records.start)..index(records.end));
        Operations::starting_at(some.unwrap_or_default(), records.start)
            .reporting_to(&self.position)
    }

    /// Size of the file in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.bytes().len() as u64
    }

    /// Bytes of a truncated record at the end of the file; 0 if there is none.
    pub fn truncated_bytes(&self) -> u64 {
        self.size_bytes() % RECORD_SIZE as u64
    }

    /// The bytes of the file.
    pub fn bytes(&self) -> &[u8] {
        &self.map
    }

    /// All complete records of the file, including zeros at its end.
    pub(crate) fn all_records(&self) -> &[TensorAccessLog] {
        let n = self.bytes().len() / RECORD_SIZE;
        match <[TensorAccessLog]>::ref_from_prefix_with_elems(self.bytes(), n) {
            Ok((records, _)) => records,
            Err(_) => &[],
        }
    }
}
