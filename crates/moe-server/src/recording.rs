//! Traces of requests: one directory with a table `routing` for each request.
//!
//! ```text
//! Observer ──► rows of the current pass ──► rows of each request ──► bounded queue ──► writer thread ──► DIR/RUN/routing.parquet
//! ```
//!
//! - The table is the one that `parquet` writes (`schemas/parquet.md`): the selected experts of each token in each layer, with the
//!   parameters of the model in its metadata. All commands that read routing read it. Its directory is named after the start of the
//!   recording and the number of the request.
//! - Rows of a pass become rows of its requests when the pass has succeeded. A pass that the session repeats after a GPU failure is
//!   recorded once.
//! - The trace of a request is written after its end, by a thread of its own. If the queue of this thread is full, or the request has more
//!   rows than [`RecordingParams::max_request_bytes`] allows, the trace is dropped and counted. No request waits for the disk, and no
//!   trace is incomplete: a table has its name only when it is complete.
//! - Traces of failed requests are discarded. The last generated token of a request is not evaluated and has no rows. Like in
//!   llama.cpp, the last layer of most architectures computes only the last token of a prompt.

mod rows;
#[cfg(test)]
mod tests;

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{SystemTime, UNIX_EPOCH};

use moe_engine::{Observer, RouterOutput};
use moe_trace::tables::RoutingTable;
use moe_trace::{ModelInfo, Sink, SinkError};

use rows::{Collector, RequestRows};

/// Name of the format in the metadata of the tables.
const FORMAT: &str = "serve";

/// Settings of a recording.
#[derive(Clone, Debug)]
pub struct RecordingParams {
    /// Directory of the traces. It is created if necessary.
    pub dir: PathBuf,
    /// Parameters of the model, for the metadata of the tables.
    pub model: ModelInfo,
    /// Maximum number of completed traces that wait for the disk, at least 1.
    pub n_queue: usize,
    /// Maximum size of the rows of one request in memory, in bytes.
    pub max_request_bytes: usize,
}

impl RecordingParams {
    /// A recording into `dir` with a queue of 16 traces and 256 MiB per request.
    pub fn new(dir: PathBuf, model: ModelInfo) -> RecordingParams {
        RecordingParams {
            dir,
            model,
            n_queue: 16,
            max_request_bytes: 256 << 20,
        }
    }
}

/// Numbers of traces.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct TraceCounts {
    /// Complete traces.
    pub written: u64,
    /// Traces that were dropped because the queue was full or the request had too many rows.
    pub dropped: u64,
    /// Traces that could not be written.
    pub failed: u64,
}

/// [`TraceCounts`] of the recording thread and its readers.
#[derive(Clone, Default)]
pub(crate) struct SharedTraceCounts(Arc<Mutex<TraceCounts>>);

impl SharedTraceCounts {
    /// The current counts.
    pub fn get(&self) -> TraceCounts {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    fn add(&self, count: impl FnOnce(&mut TraceCounts)) {
        count(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

/// The trace of a request that has ended.
struct Finished {
    sequence_id: u32,
    rows: RequestRows,
}

/// Records the routing of requests. It stays on the thread of the session, because it shares the rows with the observer.
pub struct Recording {
    collector: Rc<RefCell<Collector>>,
    /// `None` after the end.
    queue: Option<SyncSender<Finished>>,
    writer: Option<JoinHandle<()>>,
    counts: SharedTraceCounts,
}

impl Recording {
    /// Creates the directory and starts the thread that writes traces. The thread calls `report` with the error of the first trace that
    /// cannot be written.
    ///
    /// # Errors
    /// The directory cannot be created or written, or the thread cannot be started.
    pub fn start(
        params: RecordingParams,
        report: impl FnOnce(&str) + Send + 'static,
    ) -> std::io::Result<Recording> {
        let RecordingParams {
            dir,
            model,
            n_queue,
            max_request_bytes,
        } = params;
        std::fs::create_dir_all(&dir)?;
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH);
        let prefix = format!("serve-{}", since_epoch.unwrap_or_default().as_millis());
        check_writable(&dir.join(format!(".{prefix}-{}", std::process::id())))?;
        let write = move |finished: &Finished| {
            let run_id = format!("{prefix}-{:06}", finished.sequence_id);
            write_trace(&dir, &run_id, finished, &model)
        };
        Recording::with_writer(n_queue, max_request_bytes, write, report)
    }

    /// A recording whose thread calls `write` with each trace.
    fn with_writer(
        n_queue: usize,
        max_request_bytes: usize,
        write: impl FnMut(&Finished) -> Result<(), String> + Send + 'static,
        report: impl FnOnce(&str) + Send + 'static,
    ) -> std::io::Result<Recording> {
        let (queue, finished) = sync_channel(n_queue.max(1));
        let counts = SharedTraceCounts::default();
        let of_writer = counts.clone();
        let writer = std::thread::Builder::new()
            .name("trace writer".to_owned())
            .spawn(move || write_all(&finished, write, report, &of_writer))?;
        Ok(Recording {
            collector: Rc::new(RefCell::new(Collector::new(max_request_bytes))),
            queue: Some(queue),
            writer: Some(writer),
            counts,
        })
    }

    /// The counts, which other threads may read.
    pub(crate) fn counts(&self) -> SharedTraceCounts {
        self.counts.clone()
    }

    /// The observer of the session.
    pub(crate) fn observer(&self) -> Observer<'static> {
        let collector = Rc::clone(&self.collector);
        Box::new(move |routed: &RouterOutput| collector.borrow_mut().layer(routed))
    }

    /// Starts the trace of a request.
    pub(crate) fn begin(&mut self, sequence_id: u32) {
        self.collector.borrow_mut().begin(sequence_id);
    }

    /// Starts a pass.
    pub(crate) fn begin_pass(&self) {
        self.collector.borrow_mut().begin_pass();
    }

    /// Ends a pass that has succeeded: its rows belong to the traces of its requests.
    pub(crate) fn end_pass(&mut self) {
        let dropped = self.collector.borrow_mut().end_pass();
        if dropped > 0 {
            self.counts.add(|counts| counts.dropped += dropped);
        }
    }

    /// Ends the trace of a request and writes it. Does not block.
    pub(crate) fn end(&mut self, sequence_id: u32) {
        let rows = self.collector.borrow_mut().end(sequence_id);
        let Some(rows) = rows.filter(|rows| !rows.is_empty()) else {
            return;
        };
        let Some(queue) = &self.queue else {
            return;
        };
        let finished = Finished { sequence_id, rows };
        match queue.try_send(finished) {
            Ok(()) => {}
            Err(TrySendError::Full(_)) => self.counts.add(|counts| counts.dropped += 1),
            Err(TrySendError::Disconnected(_)) => self.counts.add(|counts| counts.failed += 1),
        }
    }

    /// Discards the trace of a request.
    pub(crate) fn discard(&mut self, sequence_id: u32) {
        self.collector.borrow_mut().end(sequence_id);
    }

    /// Waits until the queued traces are written.
    pub(crate) fn finish(mut self) {
        self.join();
    }

    fn join(&mut self) {
        self.queue = None;
        if let Some(writer) = self.writer.take() {
            // A thread that panicked has printed its message.
            let _ = writer.join();
        }
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        self.join();
    }
}

/// Creates and removes a file, so that a directory that cannot be written is reported before the first trace.
fn check_writable(path: &Path) -> std::io::Result<()> {
    let file = std::fs::File::options()
        .write(true)
        .create_new(true)
        .open(path)?;
    drop(file);
    std::fs::remove_file(path)
}

/// Writes traces until the queue ends. Reports the first error.
fn write_all(
    finished: &Receiver<Finished>,
    mut write: impl FnMut(&Finished) -> Result<(), String>,
    report: impl FnOnce(&str),
    counts: &SharedTraceCounts,
) {
    let mut report = Some(report);
    for finished in finished {
        match write(&finished) {
            Ok(()) => counts.add(|counts| counts.written += 1),
            Err(error) => {
                counts.add(|counts| counts.failed += 1);
                if let Some(report) = report.take() {
                    report(&error);
                }
            }
        }
    }
}

/// Writes the table of a request.
fn write_trace(
    dir: &Path,
    run_id: &str,
    finished: &Finished,
    model: &ModelInfo,
) -> Result<(), String> {
    let path = dir.join(run_id).join("routing.parquet");
    let message = |error: moe_trace::Error| error.to_string();
    let mut table = RoutingTable::create(&path, run_id, false).map_err(message)?;
    for row in finished.rows.rows(finished.sequence_id) {
        table.routing(&row).map_err(|error| match error {
            SinkError::Refused(error) | SinkError::Failed(error) => error.to_string(),
            SinkError::NeedsOrder => "the rows have no order".to_owned(),
        })?;
    }
    let (table, _) = table.complete(FORMAT, model).map_err(message)?;
    table.commit().map_err(message)
}
