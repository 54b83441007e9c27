//! The compute stream of a GPU, and its order relative to the streams of other GPUs.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaEvent, CudaStream, result};

use super::launches::Launches;
use super::memory::Account;
use super::{Error, Ptr, Result};

/// The compute stream of a GPU, and the account of its memory.
pub(super) struct Queue {
    /// Index of the GPU in the list.
    gpu: usize,
    stream: Arc<CudaStream>,
    account: Account,
    /// Recorded where the stream of another GPU waits for this one.
    so_far: CudaEvent,
    launches: Arc<Launches>,
}

impl Queue {
    /// Creates a stream for GPU number `gpu` of the list, which may allocate `limit` bytes. `launches` are
    /// those of its kernels.
    ///
    /// # Errors
    /// The driver cannot create a stream or an event.
    pub fn new(
        gpu: usize,
        context: &Arc<CudaContext>,
        limit: u64,
        launches: &Arc<Launches>,
    ) -> Result<Arc<Queue>> {
        let stream = context.new_stream();
        let so_far = context.new_event(None);
        Ok(Arc::new(Queue {
            gpu,
            stream: stream.map_err(|source| Error::driver("creating a stream", source))?,
            account: Account::new(limit),
            so_far: so_far.map_err(|source| Error::driver("creating an event", source))?,
            launches: launches.clone(),
        }))
    }

    /// Index of the GPU in the list.
    pub fn gpu(&self) -> usize {
        self.gpu
    }

    /// The stream, for anything but launches: those that were collected are started.
    pub fn stream(&self) -> &Arc<CudaStream> {
        self.launches.flush();
        &self.stream
    }

    /// The stream, for launches.
    pub fn launch_stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// Starts a pass; see [`Launches::begin_pass`].
    pub fn begin_pass(&self, n_tokens: usize, repeats: bool) {
        self.launches.begin_pass(&self.stream, n_tokens, repeats);
    }

    /// Memory in use, memory limit, and number of waits of the CPU.
    pub fn account(&self) -> &Account {
        &self.account
    }

    /// Makes the context of the GPU current on this thread.
    ///
    /// # Errors
    /// The driver fails, or an earlier call failed whose error could not be returned.
    pub fn bind(&self) -> Result<()> {
        bind(self.stream.context())
    }

    /// Waits until the stream has completed its work.
    ///
    /// # Errors
    /// Some of the work failed.
    pub fn wait(&self) -> Result<()> {
        self.account.waited();
        let waited = self.stream().synchronize();
        waited.map_err(|source| Error::driver("work on the GPU", source))?;
        self.launches.check()
    }

    /// Makes this stream wait for everything `other` was given so far.
    ///
    /// # Errors
    /// The driver cannot record or wait for an event.
    pub fn follow(&self, other: &Queue) -> Result<()> {
        let failed = |source| Error::driver("a wait between GPUs", source);
        other.so_far.record(other.stream()).map_err(failed)?;
        self.stream().wait(&other.so_far).map_err(failed)?;
        self.launches.follow_copy();
        Ok(())
    }

    /// Starts a copy of memory of another GPU, after everything its stream was given so far. The other GPU must not overwrite the
    /// memory before the copy has ended: it has to [follow](Queue::follow) this stream.
    ///
    /// # Safety
    /// `bytes` bytes are allocated at `from` on the GPU of `other`, and at `to` on the GPU of this stream.
    ///
    /// # Errors
    /// The copy cannot be started.
    pub unsafe fn copy_from(&self, other: &Queue, from: Ptr, to: Ptr, bytes: usize) -> Result<()> {
        self.follow(other)?;
        let (here, there) = (self.stream.context(), other.stream.context());
        let stream = self.stream.cu_stream();
        // SAFETY: the caller ensures that both ranges are allocated. `follow` has made the context of this GPU current.
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

/// Makes `context` current on this thread.
///
/// # Errors
/// The driver fails.
pub(super) fn bind(context: &CudaContext) -> Result<()> {
    let bound = context.bind_to_thread();
    bound.map_err(|source| Error::driver("selecting the GPU", source))
}
