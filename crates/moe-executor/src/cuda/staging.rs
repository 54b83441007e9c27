//! D2H copies of several vectors with one wait. Copies to pageable memory would wait one by one.

use super::{Gpu, Pinned, Result, Wanted};

/// A pinned staging buffer for D2H copies.
#[derive(Default)]
pub(super) struct StagingBuffer {
    memory: Option<Pinned>,
}

impl StagingBuffer {
    /// Copies values to the CPU through the staging buffer, with one wait.
    ///
    /// # Errors
    /// Pinned memory cannot be allocated, or the GPU failed in a copy or in earlier work.
    pub(super) fn fetch(&mut self, gpu: &Gpu, wanted: &mut [Wanted]) -> Result<()> {
        let bytes: usize = wanted.iter().map(|copy| copy.to.len()).sum();
        let memory = match self.memory.take() {
            Some(memory) if memory.len() >= bytes => memory,
            outgrown => {
                drop(outgrown);
                gpu.pinned(bytes.next_power_of_two())?
            }
        };
        let memory = self.memory.insert(memory);
        let mut at = 0;
        for copy in &*wanted {
            // SAFETY: the memory is read after the wait below. If an error prevents the wait, the next access is a copy on the
            // same stream, and dropping the memory waits for the GPU. `Wanted` refers to an allocation of at least this length.
            unsafe { gpu.begin_download(copy.from, memory, at, copy.to.len())? };
            at += copy.to.len();
        }
        gpu.synchronize()?;
        // SAFETY: the wait has returned, and no copy is started below.
        let mut staged = unsafe { memory.bytes() };
        for copy in wanted {
            let (bytes, rest) = staged.split_at(copy.to.len());
            copy.to.copy_from_slice(bytes);
            staged = rest;
        }
        Ok(())
    }
}
