//! A transfer that has not been started.

use cudarc::driver::CudaStream;

use crate::cuda::gpu::upload_on;
use crate::cuda::{Error, Event, Gpu, Ptr, Result};

/// A transfer that has not been started.
pub(super) struct PendingCopy {
    /// Index among the copies of the layer.
    pub index: usize,
    /// Source in CPU memory.
    from: *const [u8],
    /// Destination on the GPU.
    to: Ptr,
    /// The event after the transfer.
    pub end: Event,
    /// Whether a test injects an error.
    fails: bool,
}

impl PendingCopy {
    /// The copy number `index` of the layer, of `from` to `to`, with the event `end` after it.
    ///
    /// # Safety
    /// Until the transfer has completed or the result is dropped without a call of [`PendingCopy::start`], `from` stays valid and
    /// unchanged, and `from.len()` bytes are allocated at `to`.
    pub(super) unsafe fn new(
        index: usize,
        from: &[u8],
        to: Ptr,
        end: Event,
        fails: bool,
    ) -> PendingCopy {
        PendingCopy {
            index,
            from,
            to,
            end,
            fails,
        }
    }

    /// Size in bytes.
    pub(super) fn size_bytes(&self) -> u64 {
        self.from.len() as u64
    }

    /// Starts the transfer on `stream`, and records the event after it.
    ///
    /// # Errors
    /// The copy cannot be started, or the event cannot be recorded.
    pub(super) fn start(&self, gpu: &Gpu, stream: &CudaStream) -> Result<()> {
        if self.fails {
            return Err(Error::Injected { what: "a transfer" });
        }
        // SAFETY: the caller of `new` ensures that `from` is valid.
        upload_on(stream, self.to, unsafe { &*self.from })?;
        let mut clock = gpu.clock_mut();
        clock.record_reserved(self.end, gpu, stream)
    }
}
