//! Where records go. A session on the CPU writes each record into a block of the [`RunWriter`]. With GPUs, another thread writes the
//! records of a completed pass while the next pass runs.

use std::io;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use moe_trace::{Error, RunWriter};

use super::FLUSH_EVERY;
use super::rows::{Pending, write_pass};

/// Maximum number of passes that wait to be written. If the disk cannot keep up, the session waits.
const MAX_PASSES: usize = 8;

/// The writer of a run.
pub(super) enum Output {
    /// Used by the thread of the session.
    Direct(Box<RunWriter>),
    /// Shared with a thread that writes passes.
    Threaded(Arc<Mutex<RunWriter>>, PassThread),
}

impl Output {
    /// Starts a thread that writes passes. Without a thread, the session writes them itself.
    pub fn threaded(writer: RunWriter) -> Output {
        let writer = Arc::new(Mutex::new(writer));
        match PassThread::start(&writer) {
            Ok(thread) => Output::Threaded(writer, thread),
            // The thread that was not started has dropped its reference.
            Err(_) => match Arc::try_unwrap(writer) {
                Ok(writer) => Output::Direct(Box::new(into_inner(writer))),
                Err(_) => unreachable!("the writer has one owner"),
            },
        }
    }

    /// Calls `write` with the writer.
    pub fn with<T>(&mut self, write: impl FnOnce(&mut RunWriter) -> T) -> T {
        match self {
            Output::Direct(writer) => write(writer),
            Output::Threaded(writer, _) => write(&mut lock(writer)),
        }
    }

    /// The writer, if this thread writes the records.
    pub fn direct(&mut self) -> Option<&mut RunWriter> {
        match self {
            Output::Direct(writer) => Some(writer),
            Output::Threaded(..) => None,
        }
    }

    /// Writes the operations of a completed pass, now or on the thread; `pass` is empty afterwards.
    ///
    /// # Errors
    /// The first failed write so far.
    pub fn write_pass(&mut self, pass: &mut Vec<Pending>) -> Result<(), Error> {
        match self {
            Output::Direct(writer) => {
                let written = write_pass(writer, pass);
                pass.clear();
                written
            }
            Output::Threaded(writer, thread) => {
                if let Err(pass) = thread.send(pass) {
                    write_pass(&mut lock(writer), &pass)?;
                }
                thread.check()
            }
        }
    }

    /// Whether `n_records` more records fit in the limit of the trace.
    pub fn has_room(&self, n_records: u64) -> bool {
        match self {
            Output::Direct(writer) => writer.has_room(n_records),
            Output::Threaded(writer, thread) => {
                if lock(writer).is_limited() {
                    // The passes that are not written yet count, too.
                    thread.wait();
                }
                lock(writer).has_room(n_records)
            }
        }
    }

    /// Waits until the file contains all completed passes.
    ///
    /// # Errors
    /// The first failed write so far.
    pub fn wait(&mut self) -> Result<(), Error> {
        if let Output::Threaded(_, thread) = self {
            thread.wait();
            thread.check()?;
        }
        self.with(RunWriter::wait)
    }

    /// Ends the thread, and returns the writer.
    pub fn into_writer(self) -> Option<RunWriter> {
        match self {
            Output::Direct(writer) => Some(*writer),
            Output::Threaded(writer, thread) => {
                drop(thread);
                Arc::into_inner(writer).map(into_inner)
            }
        }
    }
}

/// A panic while the lock is held leaves complete records.
fn lock(writer: &Mutex<RunWriter>) -> MutexGuard<'_, RunWriter> {
    writer.lock().unwrap_or_else(PoisonError::into_inner)
}

fn into_inner(writer: Mutex<RunWriter>) -> RunWriter {
    writer.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// A thread that writes passes. Dropping it waits until they are written.
pub(super) struct PassThread {
    messages: Option<SyncSender<Message>>,
    /// Memory of written passes, for later ones.
    written: Receiver<Vec<Pending>>,
    failed: Arc<OnceLock<Error>>,
    thread: Option<JoinHandle<()>>,
}

enum Message {
    Pass(Vec<Pending>),
    /// Answered when all passes before it are written.
    Wait(SyncSender<()>),
}

impl PassThread {
    fn start(writer: &Arc<Mutex<RunWriter>>) -> io::Result<PassThread> {
        let (messages, received) = sync_channel(MAX_PASSES);
        let (memory, written) = sync_channel(MAX_PASSES);
        let failed = Arc::new(OnceLock::new());
        let (writer, failure) = (writer.clone(), failed.clone());
        let thread = std::thread::Builder::new()
            .name("pass-writer".into())
            .spawn(move || {
                let mut flushed = Instant::now();
                for message in received {
                    match message {
                        Message::Pass(mut pass) => {
                            let result = write(&writer, &pass, &mut flushed);
                            if let Err(error) = result {
                                let _ = failure.set(error);
                            }
                            pass.clear();
                            let _ = memory.try_send(pass);
                        }
                        Message::Wait(done) => {
                            let _ = done.send(());
                        }
                    }
                }
            })?;
        Ok(PassThread {
            messages: Some(messages),
            written,
            failed,
            thread: Some(thread),
        })
    }

    fn check(&self) -> Result<(), Error> {
        match self.failed.get() {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }
    }

    /// Passes on a pass, and empties it. Returns it as an error if the thread has ended, by a panic.
    fn send(&self, pass: &mut Vec<Pending>) -> Result<(), Vec<Pending>> {
        let memory = self.written.try_recv().unwrap_or_default();
        let pass = std::mem::replace(pass, memory);
        let Some(messages) = &self.messages else {
            return Err(pass);
        };
        messages
            .send(Message::Pass(pass))
            .map_err(|error| match error.0 {
                Message::Pass(pass) => pass,
                Message::Wait(_) => Vec::new(),
            })
    }

    fn wait(&self) {
        let (done, is_done) = sync_channel(1);
        if let Some(messages) = &self.messages
            && messages.send(Message::Wait(done)).is_ok()
        {
            // An error: the thread has ended, and nothing is left to wait for.
            let _ = is_done.recv();
        }
    }
}

impl Drop for PassThread {
    fn drop(&mut self) {
        self.messages = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn write(writer: &Mutex<RunWriter>, pass: &[Pending], flushed: &mut Instant) -> Result<(), Error> {
    let mut writer = lock(writer);
    write_pass(&mut writer, pass)?;
    if flushed.elapsed() >= FLUSH_EVERY {
        writer.flush()?;
        *flushed = Instant::now();
    }
    Ok(())
}
