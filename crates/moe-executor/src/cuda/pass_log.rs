//! Memory of a GPU to which the kernels of a pass write what is recorded, so that recording adds nothing to the stream between kernels.
//! One copy at the end of the pass brings it to the CPU.

use super::{DeviceBuffer, Gpu, Pinned, Ptr, Result};

/// Size at first, in bytes.
const FIRST_BYTES: usize = 64 << 10;

/// The log of the kernels of a pass. If a pass needs more than the log has, the log of the next pass is larger.
#[derive(Default)]
pub(super) struct PassLog {
    /// The memory, and its copy of the same size. Allocated at the first use, filled with zeros.
    memory: Option<(DeviceBuffer, Pinned)>,
    /// Bytes that this pass needs, including those without room.
    used: usize,
    /// Bytes whose copy was started.
    copied: usize,
    /// Bytes that are allocated next.
    room: usize,
}

impl PassLog {
    /// Starts the next pass.
    pub(super) fn clear(&mut self) {
        if self.used > self.capacity() {
            self.memory = None;
            self.room = self.used;
        }
        (self.used, self.copied) = (0, 0);
    }

    fn capacity(&self) -> usize {
        self.memory.as_ref().map_or(0, |(_, copy)| copy.len())
    }

    /// Bytes that this pass needs so far, including those without room.
    pub(super) fn used(&self) -> usize {
        self.used
    }

    /// Reserves `bytes`. Returns their offset and their address, or `None` without room.
    pub(super) fn reserve(&mut self, gpu: &Gpu, bytes: usize) -> Option<(usize, Ptr)> {
        if self.used == 0 && self.memory.is_none() {
            self.memory = allocate(gpu, self.room.max(FIRST_BYTES).next_power_of_two()).ok();
        }
        let at = self.used;
        self.used += bytes;
        let (memory, _) = self
            .memory
            .as_ref()
            .filter(|_| self.used <= self.capacity())?;
        Some((at, memory.ptr().offset(at)))
    }

    /// Whether the copy of everything so far was started.
    pub(super) fn is_copied(&self) -> bool {
        self.copied == self.used
    }

    /// Starts the D2H copy on the compute stream, unless everything so far is copied.
    ///
    /// # Errors
    /// The copy cannot be started.
    pub(super) fn begin_copy(&mut self, gpu: &Gpu) -> Result<()> {
        let is_copied = self.is_copied();
        self.copied = self.used;
        let Some((memory, copy)) = self.memory.as_ref().filter(|_| !is_copied) else {
            return Ok(());
        };
        let bytes = self.used.min(copy.len());
        // SAFETY: both have at least this size. The copy is read after the wait at the end of the pass.
        unsafe { gpu.begin_download(memory.ptr(), copy, 0, bytes) }
    }

    /// The copy of the log.
    ///
    /// # Safety
    /// The compute stream was waited for after the copy was started, and none was started since.
    pub(super) unsafe fn copy(&self) -> &[u8] {
        match &self.memory {
            // SAFETY: the caller ensures that no copy is in flight.
            Some((_, copy)) => unsafe { copy.bytes() },
            None => &[],
        }
    }
}

fn allocate(gpu: &Gpu, bytes: usize) -> Result<(DeviceBuffer, Pinned)> {
    let (memory, copy) = (gpu.alloc(bytes)?, gpu.pinned(bytes)?);
    gpu.upload(memory.ptr(), vec![0u8; bytes].as_slice())?;
    Ok((memory, copy))
}
