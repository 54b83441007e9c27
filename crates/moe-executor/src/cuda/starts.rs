//! Times at which kernels start. A kernel stores its start in GPU memory, so that recording adds nothing to the stream between
//! kernels; one copy brings the starts of a pass to the CPU.

use zerocopy::FromBytes;

use super::{DeviceBuffer, Gpu, Pinned, Ptr, Result};

/// Room for starts, at first. A pass with more uses events for the others, and the next pass has more room.
const FIRST_CAPACITY: usize = 4096;

/// The starts of the kernels of a pass.
#[derive(Default)]
pub(super) struct KernelStarts {
    /// Memory on the GPU and its copy, each for the same number of `u64`.
    memory: Option<(DeviceBuffer, Pinned)>,
    /// Number of reserved starts, including those without room.
    n: usize,
    /// Number of starts whose copy was started.
    n_copied: usize,
    /// Number of starts for which memory is allocated next.
    room: usize,
    /// Largest start of earlier passes: a smaller one is left over from such a pass, because its kernel failed.
    latest: u64,
}

impl KernelStarts {
    /// Removes the starts of the previous pass.
    pub(super) fn clear(&mut self) {
        let last = (0..self.n).filter_map(|slot| self.ns(slot)).max();
        self.latest = last.unwrap_or(self.latest);
        if self.n > self.capacity() {
            self.memory = None;
            self.room = self.n;
        }
        (self.n, self.n_copied) = (0, 0);
    }

    /// Whether the copies of all starts of this pass were started.
    pub(super) fn are_copied(&self) -> bool {
        self.n == self.n_copied
    }

    fn capacity(&self) -> usize {
        let memory = self.memory.as_ref();
        memory.map_or(0, |(_, copy)| copy.len() / size_of::<u64>())
    }

    /// Reserves a start. Returns its index and its address, or `None` without room.
    pub(super) fn reserve(&mut self, gpu: &Gpu) -> Option<(usize, Ptr)> {
        let slot = self.n;
        if slot == 0 && self.memory.is_none() {
            self.memory = allocate(gpu, self.room.max(FIRST_CAPACITY)).ok();
        }
        self.n += 1;
        let (memory, _) = self.memory.as_ref().filter(|_| slot < self.capacity())?;
        Some((slot, memory.ptr().offset(slot * size_of::<u64>())))
    }

    /// Starts the D2H copy of all starts on the compute stream.
    ///
    /// # Errors
    /// The copy cannot be started.
    pub(super) fn begin_download(&mut self, gpu: &Gpu) -> Result<()> {
        self.n_copied = self.n;
        let Some((memory, copy)) = &self.memory else {
            return Ok(());
        };
        let n = self.n.min(self.capacity());
        // SAFETY: the copy is read after the wait at the end of the pass, and the memory has room for `n` starts.
        unsafe { gpu.begin_download(memory.ptr(), copy, 0, n * size_of::<u64>()) }
    }

    /// A start, ns on the clock of the GPU, after the wait at the end of the pass; `None` if its kernel has not run.
    pub(super) fn ns(&self, slot: usize) -> Option<u64> {
        let (_, copy) = self.memory.as_ref()?;
        // SAFETY: the pass has ended, and a copy is only started within a pass.
        let bytes = unsafe { copy.bytes() };
        let starts = <[u64]>::ref_from_bytes(bytes).ok()?;
        let start = starts.get(slot)?;
        (*start > self.latest).then_some(*start)
    }
}

/// Memory for `n` starts. All are 0, which is the time of no kernel.
fn allocate(gpu: &Gpu, n: usize) -> Result<(DeviceBuffer, Pinned)> {
    let bytes = n.next_power_of_two() * size_of::<u64>();
    let (memory, copy) = (gpu.alloc(bytes)?, gpu.pinned(bytes)?);
    gpu.upload(
        memory.ptr(),
        vec![0u64; bytes / size_of::<u64>()].as_slice(),
    )?;
    Ok((memory, copy))
}
