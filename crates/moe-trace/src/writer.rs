//! Writing a run directory.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use moe_files::{AtomicFile, NewDirectories, Transaction};
use moe_gguf::map::OffsetMap;
use serde::Serialize;

use crate::blocks::{BlockWriter, WriteFailure};
use crate::buffers::{self, BufferEvent};
use crate::error::Error;
use crate::graph::{self, Graph};
use crate::manifest::{self, Manifest};
use crate::map_table;
use crate::phase::Phase;
use crate::record::{RECORD_SIZE, TensorAccessLog};
use crate::run::TRACE_FILE;
use crate::run_directory::{self, RunDirectory};
use crate::transfers::{self, Transfer};

/// Bytes that are kept free for the manifest at the end of a run, when the disk may be full.
const RESERVED_BYTES: usize = 64 << 10;

/// How to write a run.
#[derive(Clone, Copy, Debug, Default)]
pub struct RunOptions {
    /// Replace a run directory that exists.
    pub force: bool,
    /// Most bytes of `trace.bin`; `None` = unlimited.
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
    /// The first write to another file than the trace that failed.
    failed: Option<Error>,
    /// An unnamed file, whose room the manifest takes when the disk is full.
    reserved: Option<File>,
    /// Keeps other recorders out as long as it is open.
    _lock: Option<File>,
}

impl RunWriter {
    /// Creates `dir` with `manifest.json`, `gguf-map.parquet`, and empty `trace.bin` and `buffers.jsonl`.
    ///
    /// Sets a run id where the manifest has none. A directory that exists must be empty, or, with `options.force`, a run:
    /// a manifest with the schema of this crate, and a trace. Then the files of the old run are replaced once all of the
    /// new one are complete, `manifest.json` first and `trace.bin` after all others; other files stay. What an
    /// interrupted creation left counts as empty.
    ///
    /// # Errors
    /// [`Error::InUse`] while another writer records into `dir`; [`Error::Exists`], [`Error::NotReplaceable`].
    pub fn create(
        dir: &Path,
        mut manifest: Manifest,
        map: &OffsetMap,
        options: RunOptions,
    ) -> Result<Self, Error> {
        let mut new = NewDirectories::default();
        let RunDirectory { lock, has_run } = run_directory::take(dir, options.force, &mut new)?;
        if manifest.run_id.is_empty() {
            manifest.run_id = manifest.new_run_id();
        }
        manifest.records = None;
        let manifest_path = dir.join(manifest::FILE_NAME);
        let mut new_manifest = manifest.write_pending(&manifest_path)?;
        let mut new_map =
            map_table::write_for_run(&dir.join(map_table::FILE_NAME), map, &manifest)?;
        let trace = dir.join(TRACE_FILE);
        let mut new_trace = AtomicFile::create(&trace, true)?;
        let mut new_buffers = AtomicFile::create(&dir.join(buffers::FILE_NAME), true)?;
        let (trace_file, buffers) = (new_trace.try_clone()?, new_buffers.try_clone()?);
        let blocks =
            BlockWriter::new(trace_file).map_err(Error::io("start a writer for", &trace))?;
        let reserved = reserve(dir).map_err(Error::writing(&manifest_path))?;
        // All that needs room has succeeded. After an error the old run is as it was.
        let mut transaction = Transaction::default();
        if has_run {
            for file in [
                &mut new_manifest,
                &mut new_map,
                &mut new_trace,
                &mut new_buffers,
            ] {
                file.sync()?;
            }
            // Between the new manifest and the new trace, the old trace must not pass for the new run's.
            manifest.replacing = true;
            transaction.rename(manifest.write_pending(&manifest_path)?)?;
            transaction.sync()?;
            manifest.replacing = false;
        }
        transaction.rename(new_buffers)?;
        transaction.rename(new_map)?;
        run_directory::remove_optional_files(dir, &mut transaction)?;
        transaction.rename(new_trace)?;
        transaction.sync()?;
        transaction.rename(new_manifest)?;
        transaction.finish()?;
        new.keep();
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
            failed: None,
            reserved,
            _lock: lock,
        })
    }

    /// Refuses a directory that [`create`](Self::create) would refuse now, before long work; changes nothing.
    ///
    /// # Errors
    /// As [`create`](Self::create).
    pub fn check(dir: &Path, force: bool) -> Result<(), Error> {
        run_directory::check(dir, force)
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

    /// Writes the graph of a phase into the run.
    pub fn write_graph(&mut self, phase: Phase, graph: &Graph) -> Result<(), Error> {
        let path = graph::path(&self.dir, phase);
        let directory = self.dir.join(graph::DIRECTORY);
        let written = fs::create_dir_all(&directory)
            .map_err(Error::io("create", &directory))
            .and_then(|()| graph.write(&path));
        self.note(written)
    }

    /// Adds events to `buffers.jsonl`, at once.
    pub fn write_buffer_events(&mut self, events: &[BufferEvent]) -> Result<(), Error> {
        let path = self.dir.join(buffers::FILE_NAME);
        let written = append_lines(&mut self.buffers, &path, "buffer event", events);
        self.note(written)
    }

    /// Adds what Post-Fetch did to `transfers.jsonl`, at once. The first call makes the file, also with nothing to add.
    pub fn write_transfers(&mut self, transfers: &[Transfer]) -> Result<(), Error> {
        let path = self.dir.join(transfers::FILE_NAME);
        let written = match self.transfers.take() {
            Some(file) => Ok(file),
            None => File::create_new(&path).map_err(Error::writing(&path)),
        }
        .and_then(|file| {
            let file = self.transfers.insert(file);
            append_lines(file, &path, "transfer", transfers)
        });
        self.note(written)
    }

    /// Keeps the first failure for [`RunWriter::finish`].
    fn note(&mut self, written: Result<(), Error>) -> Result<(), Error> {
        if let Err(error) = &written {
            self.failed.get_or_insert_with(|| error.clone());
        }
        written
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
    /// # Errors
    /// The first write of the run that failed, of the trace or of another file, also where it was returned before. Then
    /// `stopped` of the manifest is the failure, and `records` is what was kept.
    pub fn finish(mut self) -> Result<u64, Error> {
        self.records = self.records();
        if let (Err(truncated), None) = (moe_files::check_inputs(), &self.manifest.stopped) {
            self.manifest.stopped = Some(truncated.to_string());
        }
        match self.blocks.close() {
            Ok(()) => {
                self.manifest.records = Some(self.records);
                let failed = self.failed.take();
                if let (Some(error), None) = (&failed, &self.manifest.stopped) {
                    self.manifest.stopped = Some(error.to_string());
                }
                self.write_manifest()?;
                failed.map_or(Ok(self.records), Err)
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
            // The failed write of the trace is what the caller has to know.
            let _ = self.write_manifest();
        }
        error
    }

    /// Writes the manifest, where the disk is full into the room that was kept for it.
    fn write_manifest(&mut self) -> Result<(), Error> {
        let path = self.dir.join(manifest::FILE_NAME);
        let written = self.manifest.write(&path);
        match (written, self.reserved.take()) {
            (Err(_), Some(reserved)) => {
                drop(reserved);
                self.manifest.write(&path)
            }
            (written, _) => written,
        }
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

/// Takes room in `dir` for the manifest at the end of the run.
fn reserve(dir: &Path) -> std::io::Result<Option<File>> {
    // Not every file system has unnamed files; without one, a full disk leaves the manifest as it is.
    let Ok(mut file) = tempfile::tempfile_in(dir) else {
        return Ok(None);
    };
    file.write_all(&[0; RESERVED_BYTES])?;
    Ok(Some(file))
}

/// Adds values to a file, one a line, at once; `what` one of them is.
fn append_lines<T: Serialize>(
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
