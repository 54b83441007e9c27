//! A transfer that is to be started.

use cudarc::driver::CudaStream;

use crate::cuda::gpu::upload_on;
use crate::cuda::{Error, Event, Gpu, Ptr, Result};

/// A transfer that is to be started.
pub(super) struct CopyOrder {
    /// Its flight.
    pub flight: usize,
    /// Bytes of the host.
    from: *const [u8],
    /// Room for them on the GPU.
    to: Ptr,
    /// The event after the transfer.
    pub arrived: Event,
    /// Whether it is made to fail.
    fails: bool,
}

impl CopyOrder {
    /// The transfer of `from` to `to`, which is that of `flight`, with the event `arrived` after it.
    ///
    /// # Safety
    /// The bytes stay as they are, and the room is there, until the transfer has arrived or will not be started any more.
    pub(super) unsafe fn new(
        flight: usize,
        from: &[u8],
        to: Ptr,
        arrived: Event,
        fails: bool,
    ) -> CopyOrder {
        CopyOrder {
            flight,
            from,
            to,
            arrived,
            fails,
        }
    }

    /// Bytes.
    pub(super) fn size_bytes(&self) -> u64 {
        self.from.len() as u64
    }

    /// Starts it on `stream`.
    ///
    /// # Errors
    /// The copy or its event cannot be started.
    pub(super) fn start(&self, gpu: &Gpu, stream: &CudaStream) -> Result<()> {
        if self.fails {
            return Err(Error::Injected { what: "a transfer" });
        }
        // SAFETY: the bytes are there, as `new` asks for.
        upload_on(stream, self.to, unsafe { &*self.from })?;
        let mut clock = gpu.clock_mut();
        clock.record_reserved(self.arrived, gpu, stream)
    }
}
