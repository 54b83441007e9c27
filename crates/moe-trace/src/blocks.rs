//! Writes records to the file in blocks, on a separate thread.
//!
//! The recording thread fills a block and sends it to the writing thread over a bounded channel. The writing thread sends
//! it back empty. A record costs no lock, no allocation and no system call, and the number of blocks bounds the memory.
//! If the disk cannot keep up, the writing thread compresses all further blocks, see [`rest`](crate::rest). The recording
//! thread waits for an empty block only if this is not fast enough either.

use std::fs::File;
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SendError, SyncSender, sync_channel};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;

use zerocopy::IntoBytes;

use crate::record::{RECORD_SIZE, TensorAccessLog};
use crate::rest::Expansion;
use crate::rest_writer::{RestWriter, expand};

/// Records in a block. 256 KiB fit into the L2 cache, so that the writing thread finds a new block there.
const BLOCK_RECORDS: usize = 256;
/// Maximum number of blocks, 8 MiB in total. Fewer are allocated as long as the writing thread keeps up.
const MAX_BLOCKS: usize = 32;

struct Block {
    records: Box<[TensorAccessLog]>,
    len: usize,
}

impl Block {
    fn new() -> Self {
        Self {
            records: vec![TensorAccessLog::default(); BLOCK_RECORDS].into(),
            len: 0,
        }
    }
}

/// A write that failed.
#[derive(Clone, Debug)]
pub(crate) struct WriteFailure {
    /// Bytes that were written before the failure.
    pub offset: u64,
    pub source: Arc<io::Error>,
}

/// Writes records to a file on a separate thread.
pub(crate) struct BlockWriter {
    block: Block,
    blocks: usize,
    filled: Option<SyncSender<Block>>,
    empty: Receiver<Block>,
    /// Empty blocks that were received while waiting.
    spare: Vec<Block>,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// What both threads know.
#[derive(Default)]
struct Shared {
    /// Whether the recording thread had to wait for the disk.
    behind: AtomicBool,
    failure: OnceLock<WriteFailure>,
    expansion: OnceLock<Expansion>,
}

impl BlockWriter {
    /// Writes to `file`, and compressed records to `rest`. With `compress`, all blocks except the first are compressed.
    pub(crate) fn new(file: File, rest: PathBuf, compress: bool) -> io::Result<Self> {
        let (filled, filled_receiver) = sync_channel(MAX_BLOCKS);
        let (empty_sender, empty) = sync_channel(MAX_BLOCKS);
        let shared = Arc::new(Shared {
            behind: compress.into(),
            ..Shared::default()
        });
        let thread = std::thread::Builder::new()
            .name("trace-writer".into())
            .spawn({
                let shared = shared.clone();
                let mut files = TraceFiles {
                    trace: file,
                    offset: 0,
                    rest_path: rest,
                    rest: None,
                };
                move || {
                    let written =
                        write_blocks(&mut files, &shared, &filled_receiver, &empty_sender)
                            .and_then(|()| files.expand());
                    // Set before the receiver is dropped: when `send` fails, the reason is already there.
                    match written {
                        Ok(Some(expansion)) => drop(shared.expansion.set(expansion)),
                        Ok(None) => {}
                        Err(error) => drop(shared.failure.set(error)),
                    }
                }
            })?;
        Ok(Self {
            block: Block::new(),
            blocks: 1,
            filled: Some(filled),
            empty,
            spare: Vec::new(),
            shared,
            thread: Some(thread),
        })
    }

    /// The next slot, and whether it is new. Its timestamp is 0; its other fields have stale values. A slot that was returned
    /// before and got no timestamp is returned again.
    #[inline]
    pub(crate) fn next(&mut self) -> Result<(&mut TensorAccessLog, bool), WriteFailure> {
        let pending = self.pending();
        if !pending {
            if self.block.len == BLOCK_RECORDS {
                self.hand_over()?;
            }
            self.block.len += 1;
        }
        let slot = &mut self.block.records[self.block.len - 1];
        slot.timestamp_ns.set(0);
        Ok((slot, !pending))
    }

    /// Whether the last slot that `next` returned has no timestamp yet.
    #[inline]
    pub(crate) fn pending(&self) -> bool {
        self.block
            .len
            .checked_sub(1)
            .is_some_and(|last| self.block.records[last].timestamp_ns.get() == 0)
    }

    /// Sends all records so far to the writing thread, without waiting until they are written.
    pub(crate) fn flush(&mut self) -> Result<(), WriteFailure> {
        if self.pending() {
            self.block.len -= 1;
        }
        match self.shared.failure.get() {
            Some(failure) => Err(failure.clone()),
            None if self.block.len == 0 => Ok(()),
            None => self.hand_over(),
        }
    }

    /// Waits until all blocks that were sent are written.
    pub(crate) fn wait(&mut self) -> Result<(), WriteFailure> {
        while self.spare.len() + 1 < self.blocks {
            let block = self.empty.recv().map_err(|_| self.failure())?;
            self.spare.push(block);
        }
        Ok(())
    }

    /// Waits until everything is written. Further calls have no effect.
    pub(crate) fn close(&mut self) -> Result<(), WriteFailure> {
        let flushed = self.flush();
        self.filled = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            return Err(self.failure());
        }
        match self.shared.failure.get() {
            Some(failure) => Err(failure.clone()),
            None => flushed,
        }
    }

    /// The records that were compressed; `None` before `close`, and if there were none.
    pub(crate) fn expansion(&self) -> Option<Expansion> {
        self.shared.expansion.get().copied()
    }

    fn hand_over(&mut self) -> Result<(), WriteFailure> {
        let fresh = match self
            .spare
            .pop()
            .ok_or(())
            .or_else(|()| self.empty.try_recv())
        {
            Ok(block) => block,
            Err(_) if self.blocks < MAX_BLOCKS => {
                self.blocks += 1;
                Block::new()
            }
            Err(_) => {
                self.shared.behind.store(true, Ordering::Relaxed);
                self.empty.recv().map_err(|_| self.failure())?
            }
        };
        let full = std::mem::replace(&mut self.block, fresh);
        let Some(filled) = &self.filled else {
            return Err(self.failure());
        };
        if let Err(SendError(full)) = filled.send(full) {
            // The block stays full, so that the next call fails too.
            self.block = full;
            return Err(self.failure());
        }
        Ok(())
    }

    fn failure(&self) -> WriteFailure {
        self.shared
            .failure
            .get()
            .cloned()
            .unwrap_or_else(|| WriteFailure {
                offset: 0,
                source: Arc::new(io::Error::other("the writing thread has ended")),
            })
    }
}

fn write_blocks(
    files: &mut TraceFiles,
    shared: &Shared,
    filled: &Receiver<Block>,
    empty: &SyncSender<Block>,
) -> Result<(), WriteFailure> {
    while let Ok(mut block) = filled.recv() {
        let bytes = block.records[..block.len].as_bytes();
        let behind = shared.behind.load(Ordering::Relaxed);
        files.write(bytes, behind)?;
        block.len = 0;
        // The recording thread may have ended already; the blocks that it sent are still written.
        let _ = empty.send(block);
    }
    Ok(())
}

/// `trace.bin` and, if the disk cannot keep up, the file with its compressed rest.
struct TraceFiles {
    trace: File,
    /// Bytes of records in both files.
    offset: u64,
    rest_path: PathBuf,
    rest: Option<RestWriter>,
}

impl TraceFiles {
    /// Appends records. The file `rest` is created when the disk is first `behind`, but not for the first records, so that
    /// `trace.bin` is never empty.
    fn write(&mut self, records: &[u8], behind: bool) -> Result<(), WriteFailure> {
        if behind && self.offset > 0 && self.rest.is_none() {
            self.rest = RestWriter::create(&self.rest_path, self.offset).ok();
        }
        // Without a file for the rest, the recording thread waits for the disk.
        let Some(rest) = &mut self.rest else {
            return write_counted(&mut self.trace, records, &mut self.offset).map_err(|source| {
                // Remove the truncated last record, so that the file contains complete records only.
                let _ = self
                    .trace
                    .set_len(self.offset - self.offset % RECORD_SIZE as u64);
                self.failure(source)
            });
        };
        rest.write(records).map_err(|source| self.failure(source))?;
        self.offset += records.len() as u64;
        Ok(())
    }

    /// Appends the compressed records to the trace.
    fn expand(&mut self) -> Result<Option<Expansion>, WriteFailure> {
        if self.rest.take().is_none() {
            return Ok(None);
        }
        let expanded = expand(&self.rest_path, &mut self.trace);
        expanded.map(Some).map_err(|source| self.failure(source))
    }

    fn failure(&self, source: io::Error) -> WriteFailure {
        WriteFailure {
            offset: self.offset,
            source: Arc::new(source),
        }
    }
}

/// Like `write_all`, but adds the bytes written to `offset`, also on failure.
fn write_counted(file: &mut File, mut bytes: &[u8], offset: &mut u64) -> io::Result<()> {
    while !bytes.is_empty() {
        match file.write(bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(n) => {
                *offset += n as u64;
                bytes = bytes.get(n..).unwrap_or_default();
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
