//! The stream of a GPU that computes, and its order with the streams of other GPUs.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cudarc::driver::{CudaContext, CudaEvent, CudaStream, result};

use super::memory::Account;
use super::{Error, Ptr, Result};

/// The stream of a GPU that computes, and what is counted of its GPU.
pub(super) struct Queue {
    /// Index of the GPU in the list.
    gpu: usize,
    stream: Arc<CudaStream>,
    account: Account,
    /// Recorded where the stream of another GPU starts to wait for this one.
    so_far: CudaEvent,
    /// Whether the next kernel must start after all that the stream was given.
    in_order: Arc<AtomicBool>,
}

impl Queue {
    /// A new stream on the GPU of `context`, which may allocate `limit` bytes. Kernels on it start early unless `in_order` is
    /// set.
    ///
    /// # Errors
    /// The driver has no stream or event left.
    pub fn new(
        gpu: usize,
        context: &Arc<CudaContext>,
        limit: u64,
        in_order: &Arc<AtomicBool>,
    ) -> Result<Arc<Queue>> {
        let stream = context.new_stream();
        let so_far = context.new_event(None);
        Ok(Arc::new(Queue {
            gpu,
            stream: stream.map_err(|source| Error::driver("a new stream", source))?,
            account: Account::new(limit),
            so_far: so_far.map_err(|source| Error::driver("a new event", source))?,
            in_order: in_order.clone(),
        }))
    }

    /// Index of the GPU in the list.
    pub fn gpu(&self) -> usize {
        self.gpu
    }

    /// The stream.
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// Memory in use, its limit, and how often the CPU waited.
    pub fn account(&self) -> &Account {
        &self.account
    }

    /// Makes the GPU the one that calls of the driver on this thread are for.
    ///
    /// # Errors
    /// The driver's, also of an earlier call whose error could not be returned.
    pub fn bind(&self) -> Result<()> {
        bind(self.stream.context())
    }

    /// Waits for all that the stream was given.
    ///
    /// # Errors
    /// Some of it failed.
    pub fn wait(&self) -> Result<()> {
        self.account.waited();
        let waited = self.stream.synchronize();
        waited.map_err(|source| Error::driver("the GPU's work", source))
    }

    /// Has what this stream is given next start after all that `other` was given so far.
    ///
    /// # Errors
    /// The driver's.
    pub fn follow(&self, other: &Queue) -> Result<()> {
        let failed = |source| Error::driver("a wait between GPUs", source);
        other.so_far.record(&other.stream).map_err(failed)?;
        self.stream.wait(&other.so_far).map_err(failed)?;
        self.in_order.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Starts a copy of memory of another GPU, after everything its stream was given so far. The other GPU must not overwrite the memory
    /// before the copy has ended: it has to [follow](Queue::follow) this stream.
    ///
    /// # Safety
    /// There are as many bytes at `from`, on the GPU of `other`, and at `to`, on the GPU of this stream.
    ///
    /// # Errors
    /// The copy cannot be started.
    pub unsafe fn copy_from(&self, other: &Queue, from: Ptr, to: Ptr, bytes: usize) -> Result<()> {
        self.follow(other)?;
        let (here, there) = (self.stream.context(), other.stream.context());
        let stream = self.stream.cu_stream();
        // SAFETY: by the caller's promise. `follow` has made this GPU the current one.
        let copied = unsafe {
            if here == there {
                result::memcpy_dtod_async(to.0, from.0, bytes, stream)
            } else {
                let (here, there) = (here.cu_ctx(), there.cu_ctx());
                result::memcpy_peer_async(here, to.0, there, from.0, bytes, stream)
            }
        };
        copied.map_err(|source| Error::driver("a copy between GPUs", source))
    }
}

/// Makes the GPU of `context` the one that calls of the driver on this thread are for.
///
/// # Errors
/// The driver's.
pub(super) fn bind(context: &CudaContext) -> Result<()> {
    let bound = context.bind_to_thread();
    bound.map_err(|source| Error::driver("switching to the GPU", source))
}
