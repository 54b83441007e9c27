//! Writing a run directory.

use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};

use moe_gguf::map::OffsetMap;

use crate::blocks::{BlockWriter, WriteFailure};
use crate::buffers::{self, BufferEvent};
use crate::error::Error;
use crate::files::{MadeDirectories, PendingFile};
use crate::graph::{self, Graph};
use crate::lines;
use crate::manifest::{self, Manifest};
use crate::map_table;
use crate::record::{PHASE_GENERATE, PHASE_PROMPT, RECORD_SIZE, TensorAccessLog};
use crate::run::TRACE_FILE;
use crate::transfers::{self, Transfer};

/// How to write a run.
#[derive(Clone, Copy, Debug, Default)]
pub struct RunOptions {
    /// Replace a run directory that is there.
    pub force: bool,
    /// Bytes that `trace.bin` may have; `None` = any number.
    pub max_trace_bytes: Option<u64>,
}

/// Writes a run directory, which is valid at every moment.
///
/// [`next_record`](Self::next_record) hands out the slot of the next record in a block; a thread of the writer's own brings
/// blocks to the file. [`flush`](Self::flush) at the end of every token or pass bounds what a killed recorder loses.
/// Dropping the writer keeps what was recorded; [`finish`](Self::finish) also tells the manifest how much that is.
///
/// A failed write shows at one of the next calls as [`Error::WriteTrace`], at the latest in `finish`.
pub struct RunWriter {
    dir: PathBuf,
    manifest: Manifest,
    records: u64,
    max_records: u64,
    blocks: BlockWriter,
    buffers: File,
    /// `transfers.jsonl`, from the first transfer on.
    transfers: Option<File>,
    /// Keeps other recorders out as long as it is open.
    _lock: Option<File>,
}

impl RunWriter {
    /// Creates `dir` with `manifest.json`, `gguf-map.parquet`, and empty `trace.bin` and `buffers.jsonl`.
    ///
    /// Gives the manifest a run id if it has none. A directory that exists must be empty, or a run directory and
    /// `options.force` set: then the files of the old run are replaced once those of the new one are ready, other files stay.
    ///
    /// Errors: [`Error::InUse`] while another writer records into `dir`.
    pub fn create(
        dir: &Path,
        mut manifest: Manifest,
        map: &OffsetMap,
        options: RunOptions,
    ) -> Result<Self, Error> {
        let mut directory = MadeDirectories::default();
        let lock = take_directory(dir, options.force, &mut directory)?;
        if manifest.run_id.is_empty() {
            manifest.run_id = manifest.new_run_id();
        }
        manifest.records = None;
        let new_manifest = manifest.write_pending(&dir.join(manifest::FILE_NAME))?;
        let new_map = map_table::write_for_run(&dir.join(map_table::FILE_NAME), map, &manifest)?;
        let trace = dir.join(TRACE_FILE);
        let (new_trace, file) = PendingFile::create(&trace, true)?;
        let (new_buffers, buffers) = PendingFile::create(&dir.join(buffers::FILE_NAME), true)?;
        let blocks = BlockWriter::new(file).map_err(Error::io("start a writer for", &trace))?;
        // Everything that can fail has succeeded. The trace goes first: beside a new manifest an old one could pass for it.
        for file in [new_trace, new_buffers, new_map, new_manifest] {
            file.commit()?;
        }
        for phase in [PHASE_PROMPT, PHASE_GENERATE] {
            remove_old(&graph::path(dir, phase))?;
        }
        remove_old(&dir.join(transfers::FILE_NAME))?;
        directory.keep();
        let max_records = options
            .max_trace_bytes
            .map_or(u64::MAX, |bytes| bytes / RECORD_SIZE as u64);
        Ok(Self {
            dir: dir.to_owned(),
            manifest,
            records: 0,
            max_records,
            blocks,
            buffers,
            transfers: None,
            _lock: lock,
        })
    }

    /// The next record's slot.
    ///
    /// It has the contents of some earlier record, but for a zero timestamp: overwrite all of it. A slot that is left without
    /// a timestamp is no record, the next call hands it out again.
    ///
    /// Errors: [`Error::TraceFull`] at the limit (nothing is lost; `finish` as usual), [`Error::WriteTrace`].
    #[inline]
    pub fn next_record(&mut self) -> Result<&mut TensorAccessLog, Error> {
        if self.records >= self.max_records && !self.blocks.pending() {
            return Err(self.full());
        }
        match self.blocks.next() {
            Ok((slot, is_new)) => {
                self.records += u64::from(is_new);
                Ok(slot)
            }
            Err(failure) => Err(write_error(&self.dir, failure)),
        }
    }

    /// Whether `n_records` more fit under the limit: ask before a pass, so that the trace ends with a whole one.
    pub fn has_room(&self, n_records: u64) -> bool {
        n_records <= self.max_records.saturating_sub(self.records())
    }

    /// Records so far.
    pub fn records(&self) -> u64 {
        self.records - u64::from(self.blocks.pending())
    }

    /// The run directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The manifest, to complete before [`finish`](Self::finish) (token counts, `stopped`).
    pub fn manifest_mut(&mut self) -> &mut Manifest {
        &mut self.manifest
    }

    /// Writes the graph of a phase ([`PHASE_PROMPT`] or [`PHASE_GENERATE`]) into the run.
    pub fn write_graph(&mut self, phase: u8, graph: &Graph) -> Result<(), Error> {
        let path = graph::path(&self.dir, phase);
        if let Some(directory) = path.parent() {
            fs::create_dir_all(directory).map_err(Error::io("create", directory))?;
        }
        graph.write_pending(&path)?.commit()
    }

    /// Adds events to `buffers.jsonl`, at once.
    pub fn write_buffer_events(&mut self, events: &[BufferEvent]) -> Result<(), Error> {
        let path = self.dir.join(buffers::FILE_NAME);
        lines::append(&mut self.buffers, &path, "buffer event", events)
    }

    /// Adds what Post-Fetch did to `transfers.jsonl`, at once. The first call makes the file, also with nothing to add.
    pub fn write_transfers(&mut self, transfers: &[Transfer]) -> Result<(), Error> {
        let path = self.dir.join(transfers::FILE_NAME);
        let file = match &mut self.transfers {
            Some(file) => file,
            none => none.insert(File::create(&path).map_err(Error::writing(&path))?),
        };
        lines::append(file, &path, "transfer", transfers)
    }

    /// Hands the records so far to the writing thread, without waiting for it.
    pub fn flush(&mut self) -> Result<(), Error> {
        self.records -= u64::from(self.blocks.pending());
        self.blocks
            .flush()
            .map_err(|failure| write_error(&self.dir, failure))
    }

    /// Waits for the last record to be written and writes the manifest with `records`; returns their number.
    ///
    /// After a failed write the manifest tells how many records were kept, and the failure is returned.
    pub fn finish(mut self) -> Result<u64, Error> {
        self.records = self.records();
        match self.blocks.close() {
            Ok(()) => {
                self.manifest.records = Some(self.records);
                self.manifest.write(&self.dir.join(manifest::FILE_NAME))?;
                Ok(self.records)
            }
            Err(failure) => Err(self.note_failure(failure)),
        }
    }

    /// Tells the manifest about a failed write, as far as the disk lets it.
    fn note_failure(&mut self, failure: WriteFailure) -> Error {
        let error = write_error(&self.dir, failure);
        if let Error::WriteTrace {
            records, source, ..
        } = &error
        {
            self.manifest.records = Some(*records);
            self.manifest.stopped =
                Some(format!("the trace could not be written further: {source}"));
            let _ = self.manifest.write(&self.dir.join(manifest::FILE_NAME));
        }
        error
    }

    #[cold]
    fn full(&self) -> Error {
        let max_bytes = self.max_records.saturating_mul(RECORD_SIZE as u64);
        Error::TraceFull {
            path: self.dir.join(TRACE_FILE),
            max_bytes,
        }
    }
}

impl Drop for RunWriter {
    fn drop(&mut self) {
        // After `finish` there is nothing left to write.
        if let Err(failure) = self.blocks.close() {
            self.note_failure(failure);
        }
    }
}

#[cold]
fn write_error(dir: &Path, failure: WriteFailure) -> Error {
    Error::WriteTrace {
        path: dir.join(TRACE_FILE),
        offset: failure.offset,
        records: failure.offset / RECORD_SIZE as u64,
        source: failure.source,
    }
}

/// Removes a file of the run that was replaced.
fn remove_old(path: &Path) -> Result<(), Error> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(Error::io("remove", path)(error))
        }
        _ => Ok(()),
    }
}

/// Makes `dir` if need be and takes it for a run: it is empty, or may be replaced, and no other recorder has it.
fn take_directory(
    dir: &Path,
    force: bool,
    made: &mut MadeDirectories,
) -> Result<Option<File>, Error> {
    if dir.symlink_metadata().is_ok() && !dir.is_dir() {
        return Err(Error::NotReplaceable {
            path: dir.to_owned(),
        });
    }
    made.create(dir)?;
    // Somebody else records there, and may not have written yet: the directory is theirs now.
    let lock = lock_directory(dir).inspect_err(|_| made.keep())?;
    let is_empty = fs::read_dir(dir)
        .map_err(Error::io("list", dir))?
        .next()
        .is_none();
    if !is_empty && !force {
        return Err(Error::Exists {
            path: dir.to_owned(),
        });
    }
    if !is_empty && Manifest::read(&dir.join(manifest::FILE_NAME)).is_err() {
        return Err(Error::NotReplaceable {
            path: dir.to_owned(),
        });
    }
    Ok(lock)
}

/// Locks a directory against other recorders until the file is closed; readers do not ask for the lock.
///
/// `None` where a directory cannot be opened or locked (other systems than Unix, some network file systems): nothing
/// keeps two recorders apart there.
fn lock_directory(dir: &Path) -> Result<Option<File>, Error> {
    let Ok(file) = File::open(dir) else {
        return Ok(None);
    };
    match file.try_lock() {
        Ok(()) => Ok(Some(file)),
        Err(TryLockError::WouldBlock) => Err(Error::InUse {
            path: dir.to_owned(),
        }),
        Err(TryLockError::Error(_)) => Ok(None),
    }
}
