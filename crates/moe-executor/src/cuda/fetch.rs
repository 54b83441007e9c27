//! Values that the host is about to read, fetched together: a copy to memory that is not pinned is waited for by itself.

use super::{Gpu, Pinned, Result, Wanted};

/// Pinned memory that values pass through on their way to the host.
#[derive(Default)]
pub(super) struct Staging {
    memory: Option<Pinned>,
}

impl Staging {
    /// Copies values to the host, and waits for them once.
    ///
    /// # Errors
    /// There is no memory, or the GPU failed, now or in what was launched before.
    pub(super) fn fetch(&mut self, gpu: &Gpu, wanted: &mut [Wanted]) -> Result<()> {
        let bytes: usize = wanted.iter().map(|one| one.to.len()).sum();
        let memory = match self.memory.take() {
            Some(memory) if memory.len() >= bytes => memory,
            outgrown => {
                drop(outgrown);
                gpu.pinned(bytes.next_power_of_two())?
            }
        };
        let memory = self.memory.insert(memory);
        let mut at = 0;
        for one in &*wanted {
            // SAFETY: the memory is read after the wait below. If that is not reached, the next use of the memory starts with copies
            // in the order of the same stream, and dropping it waits for the GPU.
            unsafe { gpu.begin_download(one.from, memory, at, one.to.len())? };
            at += one.to.len();
        }
        gpu.synchronize()?;
        // SAFETY: all copies have ended, and none is started below.
        let mut come = unsafe { memory.bytes() };
        for one in wanted {
            let (bytes, others) = come.split_at(one.to.len());
            one.to.copy_from_slice(bytes);
            come = others;
        }
        Ok(())
    }
}
