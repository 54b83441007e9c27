//! A transfer that is to be started.

use cudarc::driver::CudaStream;

use crate::cuda::clock::{Clock, Mark};
use crate::cuda::gpu::upload_on;
use crate::cuda::{Error, Ptr, Result};

/// A transfer that is to be started.
pub(super) struct Order {
    /// Its flight.
    pub flight: usize,
    /// Bytes of the host.
    from: *const [u8],
    /// Room for them on the GPU.
    to: Ptr,
    /// The moment behind the transfer.
    pub arrived: Mark,
    /// Whether it is made to fail.
    fails: bool,
}

impl Order {
    /// The transfer of `from` to `to`, which is that of `flight`, with the moment `arrived` behind it.
    ///
    /// # Safety
    /// The bytes stay as they are, and the room is there, until the transfer has arrived or will not be started any more.
    pub(super) unsafe fn new(
        flight: usize,
        from: &[u8],
        to: Ptr,
        arrived: Mark,
        fails: bool,
    ) -> Order {
        Order {
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
    pub(super) fn start(&self, stream: &CudaStream, clock: &Clock) -> Result<()> {
        if self.fails {
            return Err(Error::Injected { what: "a transfer" });
        }
        // SAFETY: the bytes are there, as `new` asks for.
        upload_on(stream, self.to, unsafe { &*self.from })?;
        let recorded = clock.event(self.arrived).record(stream);
        recorded.map_err(|source| Error::driver("an event", source))
    }
}
