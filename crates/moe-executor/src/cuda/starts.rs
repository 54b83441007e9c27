//! Times at which kernels start. A kernel stores its start in the log of the pass.

use zerocopy::FromBytes;

use super::pass_log::PassLog;
use super::{Gpu, Ptr, Result};

/// The starts of the kernels of a pass. Without room in the log, other starts are measured by events.
#[derive(Default)]
pub(super) struct KernelStarts {
    /// A `u64` for each start. 0 is the time of no kernel.
    log: PassLog,
    /// Largest start of earlier passes: a smaller one is left over from such a pass, because its kernel failed.
    latest: u64,
}

impl KernelStarts {
    /// Removes the starts of the previous pass.
    pub(super) fn clear(&mut self) {
        let n = self.log.used() / size_of::<u64>();
        let last = (0..n).filter_map(|slot| self.ns(slot)).max();
        self.latest = last.unwrap_or(self.latest);
        self.log.clear();
    }

    /// Whether the copies of all starts of this pass were started.
    pub(super) fn are_copied(&self) -> bool {
        self.log.is_copied()
    }

    /// Reserves a start. Returns its index and its address, or `None` without room.
    pub(super) fn reserve(&mut self, gpu: &Gpu) -> Option<(usize, Ptr)> {
        let (at, ptr) = self.log.reserve(gpu, size_of::<u64>())?;
        Some((at / size_of::<u64>(), ptr))
    }

    /// Starts the D2H copy of all starts on the compute stream.
    ///
    /// # Errors
    /// The copy cannot be started.
    pub(super) fn begin_copy(&mut self, gpu: &Gpu) -> Result<()> {
        self.log.begin_copy(gpu)
    }

    /// A start, ns on the clock of the GPU, after the wait at the end of the pass; `None` if its kernel has not run.
    pub(super) fn ns(&self, slot: usize) -> Option<u64> {
        // SAFETY: the pass has ended, and a copy is only started within a pass.
        let bytes = unsafe { self.log.copy() };
        let starts = <[u64]>::ref_from_bytes(bytes).ok()?;
        let start = starts.get(slot)?;
        (*start > self.latest).then_some(*start)
    }
}
