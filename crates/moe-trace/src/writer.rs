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
use crate::hot_cache;
use crate::manifest::{self, Manifest};
use crate::map_table;
use crate::phase::Phase;
use crate::record::{RECORD_SIZE, TensorAccessLog};
use crate::rest::{Expansion, REST_FILE};
use crate::run::TRACE_FILE;
use crate::run_directory::{self, RunDirectory};
use crate::transfers::{self, Transfer};

/// Bytes that are reserved for the manifest at the end of a run, because the disk may be full then.
const RESERVED_BYTES: usize = 64 << 10;

/// Options for writing a run. By default, an existing run is kept and the trace has no limit.
#[derive(Clone, Copy, Debug, Default)]
pub struct RunOptions {
    /// Replace an existing run directory. Without it, an existing run is [`Error::Exists`].
    pub force: bool,
    /// Maximum size of `trace.bin` in bytes; `None` for no limit.
    pub max_trace_bytes: Option<u64>,
    /// Compress the records while recording, and expand them at the end. This happens without it if the disk cannot keep up.
    pub compress: bool,
}

/// Writes a run directory, which is valid at any time.
///
/// [`next_record`](Self::next_record) returns the slot of the next record in a block. A separate thread writes blocks to the
/// file. Call [`flush`](Self::flush) after every token or pass to limit what is lost if the process is killed.
/// Dropping the writer keeps all records; [`finish`](Self::finish) also stores their number in the manifest.
///
/// One of the following calls, at the latest `finish`, returns a failed write as [`Error::WriteTrace`].
pub struct RunWriter {
    dir: PathBuf,
    manifest: Manifest,
    records: u64,
    max_records: u64,
    blocks: BlockWriter,
    buffers: File,
    /// `transfers.jsonl`; `None` before the first transfer.
    transfers: Option<File>,
    /// The first failed write to a file other than the trace.
    failed: Option<Error>,
    /// An unnamed file that reserves disk space for the manifest.
    reserved: Option<File>,
    /// The lock against other recorders, held as long as the file is open.
    _lock: Option<File>,
}

impl RunWriter {
    /// Creates `dir` with `manifest.json`, `gguf-map.parquet`, and empty `trace.bin` and `buffers.jsonl`.
    ///
    /// Sets a run id if the manifest has none. An existing directory must be empty or, with `options.force`, a run: it has a
    /// manifest with this crate's schema and a trace. The files of an old run are replaced after all new files are complete,
    /// `manifest.json` first and `trace.bin` last. Other files are kept. Files of an interrupted creation are ignored.
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
        let blocks = BlockWriter::new(trace_file, dir.join(REST_FILE), options.compress)
            .map_err(Error::io("start a writer for", &trace))?;
        let reserved = reserve(dir).map_err(Error::writing(&manifest_path))?;
        // Everything that needs disk space has succeeded. After an error so far, the old run is unchanged.
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
            // Until the new trace replaces the old one, the manifest states that `trace.bin` belongs to the old run.
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

    /// Returns the error that [`create`](Self::create) would return now, without changing anything. Call it before long work.
    /// `force` is [`RunOptions::force`].
    ///
    /// # Errors
    /// Those of [`create`](Self::create).
    pub fn check(dir: &Path, force: bool) -> Result<(), Error> {
        run_directory::check(dir, force)
    }

    /// The slot of the next record.
    ///
    /// Its timestamp is 0; all other fields have values of an earlier record and must be overwritten. A slot whose timestamp
    /// stays 0 is not a record, and the next call returns it again.
    ///
    /// # Errors
    /// [`Error::TraceFull`] at the limit (no record is lost; call `finish` as usual), [`Error::WriteTrace`].
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

    /// Whether `n_records` more records fit in [`RunOptions::max_trace_bytes`]. Check it before a pass, so that the trace ends with
    /// a complete pass.
    pub fn has_room(&self, n_records: u64) -> bool {
        n_records <= self.max_records.saturating_sub(self.records())
    }

    /// Whether [`RunOptions::max_trace_bytes`] limits the trace.
    pub fn is_limited(&self) -> bool {
        self.max_records < u64::MAX
    }

    /// Waits until all records so far are in the file.
    ///
    /// # Errors
    /// [`Error::WriteTrace`] if a write failed.
    pub fn wait(&mut self) -> Result<(), Error> {
        self.flush()?;
        self.blocks
            .wait()
            .map_err(|failure| write_error(&self.dir, failure))
    }

    /// Number of records so far, including those that are not yet written to the file.
    pub fn records(&self) -> u64 {
        self.records - u64::from(self.blocks.pending())
    }

    /// The run directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The manifest. Complete it before [`finish`](Self::finish) (token counts, `stopped`).
    pub fn manifest_mut(&mut self) -> &mut Manifest {
        &mut self.manifest
    }

    /// Writes the graph of a phase into the run.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Json`], [`Error::Write`].
    pub fn write_graph(&mut self, phase: Phase, graph: &Graph) -> Result<(), Error> {
        let path = graph::path(&self.dir, phase);
        let directory = self.dir.join(graph::DIRECTORY);
        let written = fs::create_dir_all(&directory)
            .map_err(Error::io("create", &directory))
            .and_then(|()| graph.write(&path));
        self.note(written)
    }

    /// Appends events to `buffers.jsonl` immediately.
    ///
    /// # Errors
    /// [`Error::Write`].
    pub fn write_buffer_events(&mut self, events: &[BufferEvent]) -> Result<(), Error> {
        let path = self.dir.join(buffers::FILE_NAME);
        let written = append_lines(&mut self.buffers, &path, "buffer event", events);
        self.note(written)
    }

    /// Appends transfers of Post-Fetch to `transfers.jsonl` immediately. The first call creates the file, even without transfers.
    ///
    /// # Errors
    /// [`Error::Write`].
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

    /// Writes `perf.json`, the counters of a hot expert cache, completely or not at all. `report` is JSON without a newline at
    /// the end. Call it at the end of the run, before [`finish`](Self::finish).
    ///
    /// # Errors
    /// [`Error::Write`], [`Error::Output`].
    pub fn write_perf(&mut self, report: &str) -> Result<(), Error> {
        let path = self.dir.join(hot_cache::PERF_FILE);
        let written = AtomicFile::create(&path, true)
            .map_err(Error::from)
            .and_then(|mut file| {
                writeln!(file, "{report}").map_err(Error::writing(&path))?;
                Ok(file.commit_unchecked()?)
            });
        self.note(written)
    }

    /// Stores the first failure for [`RunWriter::finish`].
    fn note(&mut self, written: Result<(), Error>) -> Result<(), Error> {
        if let Err(error) = &written {
            self.failed.get_or_insert_with(|| error.clone());
        }
        written
    }

    /// Sends all records so far to the writing thread, without waiting until they are written.
    ///
    /// # Errors
    /// [`Error::WriteTrace`] if an earlier write failed.
    pub fn flush(&mut self) -> Result<(), Error> {
        self.records -= u64::from(self.blocks.pending());
        self.blocks
            .flush()
            .map_err(|failure| write_error(&self.dir, failure))
    }

    /// Waits until the last record is written and compressed records are expanded, then writes the manifest with `records`.
    /// Returns the number of records.
    ///
    /// # Errors
    /// The first failed write to the trace or another file, even if an earlier call returned it. `stopped` of the manifest is
    /// then that error, and `records` the number of complete records.
    pub fn finish(self) -> Result<u64, Error> {
        self.finish_with_expansion().map(|(records, _)| records)
    }

    /// Like [`RunWriter::finish`]. Also returns the [`expansion`](Manifest::expansion) in the manifest.
    ///
    /// # Errors
    /// Those of [`RunWriter::finish`].
    pub fn finish_with_expansion(mut self) -> Result<(u64, Option<Expansion>), Error> {
        self.records = self.records();
        if let (Err(truncated), None) = (moe_files::check_inputs(), &self.manifest.stopped) {
            self.manifest.stopped = Some(truncated.to_string());
        }
        match self.blocks.close() {
            Ok(()) => {
                self.manifest.records = Some(self.records);
                self.manifest.expansion = self.blocks.expansion();
                let failed = self.failed.take();
                if let (Some(error), None) = (&failed, &self.manifest.stopped) {
                    self.manifest.stopped = Some(error.to_string());
                }
                self.write_manifest()?;
                failed.map_or(Ok((self.records, self.manifest.expansion)), Err)
            }
            Err(failure) => Err(self.note_failure(failure)),
        }
    }

    /// Stores a failed write in the manifest, if the disk allows it.
    fn note_failure(&mut self, failure: WriteFailure) -> Error {
        let error = write_error(&self.dir, failure);
        if let Error::WriteTrace {
            records, source, ..
        } = &error
        {
            self.manifest.records = Some(*records);
            self.manifest.stopped = Some(format!("a write to the trace failed: {source}"));
            // Return the failed write to the trace, also if the manifest cannot be written.
            let _ = self.write_manifest();
        }
        error
    }

    /// Writes the manifest. If the disk is full, the reserved space is released for it.
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
        // After `finish`, `close` has no effect.
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

/// Reserves disk space in `dir` for the manifest at the end of the run.
fn reserve(dir: &Path) -> std::io::Result<Option<File>> {
    // Some file systems have no unnamed files. Then the manifest cannot be updated on a full disk.
    let Ok(mut file) = tempfile::tempfile_in(dir) else {
        return Ok(None);
    };
    file.write_all(&[0; RESERVED_BYTES])?;
    Ok(Some(file))
}

/// Appends values to a file, one JSON line each. `what` describes a value in errors.
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
