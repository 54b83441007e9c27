//! One GPU of the list: its stream, its kernels, its memory, its clock.

use std::cell::{Ref, RefCell, RefMut};
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError, result, sys};
use zerocopy::{Immutable, IntoBytes};

use super::clock::EventClock;
use super::launch::Kernels;
use super::queue::{Queue, bind};
use super::{DeviceBuffer, Error, GpuInfo, GpuSpec, Pinned, Ptr, Registered, Result};

/// The first version of CUDA whose driver takes the kernels' PTX (ISA 8.4).
const OLDEST_DRIVER: i32 = 12040;

/// An entry in the list of GPUs. Entries of the same physical GPU share nothing but its hardware.
pub struct Gpu {
    /// Place in the list.
    index: usize,
    context: Arc<CudaContext>,
    /// The stream that computes.
    queue: Arc<Queue>,
    kernels: Kernels,
    clock: RefCell<EventClock>,
    info: GpuInfo,
}

impl Gpu {
    /// Whether there is a driver and a GPU.
    ///
    /// # Errors
    /// What is missing.
    pub fn look() -> Result<()> {
        // SAFETY: asks the system's loader whether the library can be loaded, and nothing of it.
        if !unsafe { sys::is_culib_present() } {
            return Err(Error::NoDriver);
        }
        match CudaContext::device_count() {
            Ok(0) | Err(DriverError(sys::CUresult::CUDA_ERROR_NO_DEVICE)) => Err(Error::NoDevice),
            Ok(_) => Ok(()),
            Err(source) => Err(Error::driver("looking for a GPU", source)),
        }
    }

    /// Opens GPUs in the order of a list. If a GPU is listed more than once, its entries without a limit get equal shares of its free
    /// memory.
    ///
    /// # Errors
    /// There is none, or not that one, the driver does not open it, or one of both is too old for the kernels.
    pub fn open_all(specs: &[GpuSpec]) -> Result<Vec<Gpu>> {
        Gpu::look()?;
        let failed = |source| Error::driver("opening the GPU", source);
        let mut driver = 0;
        // SAFETY: writes one number.
        let version = unsafe { sys::cuDriverGetVersion(&mut driver) };
        version.result().map_err(failed)?;
        if driver < OLDEST_DRIVER {
            return Err(Error::OldDriver { version: driver });
        }
        let count = CudaContext::device_count().map_err(failed)?.max(0) as usize;
        let open = |(index, spec): (usize, &GpuSpec)| {
            let ordinal = spec.ordinal;
            if ordinal >= count {
                return Err(Error::NoSuchGpu { ordinal, count });
            }
            let entries = specs.iter().filter(|other| other.ordinal == ordinal);
            Gpu::open(index, spec, entries.count() as u64, driver)
        };
        specs.iter().enumerate().map(open).collect()
    }

    /// Opens one of `entries` entries of a GPU.
    fn open(index: usize, spec: &GpuSpec, entries: u64, driver: i32) -> Result<Gpu> {
        let failed = |source| Error::driver("opening the GPU", source);
        let context = CudaContext::new(spec.ordinal).map_err(failed)?;
        // SAFETY: order between streams is made by events of our own; cudarc's would cost a call for every buffer.
        unsafe { context.disable_event_tracking() };
        let (free, total) = context.mem_get_info().map_err(failed)?;
        let info = GpuInfo {
            ordinal: spec.ordinal,
            name: context.name().map_err(failed)?,
            compute_capability: context.compute_capability().map_err(failed)?,
            memory_bytes: total as u64,
            free_bytes: free as u64,
            driver,
        };
        let limit = spec.limit.unwrap_or(free as u64 / entries);
        let kernels = Kernels::load(&context)?;
        Ok(Gpu {
            index,
            queue: Queue::new(index, &context, limit.min(free as u64), kernels.in_order())?,
            kernels,
            clock: RefCell::default(),
            context,
            info,
        })
    }

    /// Its place in the list.
    pub fn index(&self) -> usize {
        self.index
    }

    /// What it is.
    pub fn info(&self) -> &GpuInfo {
        &self.info
    }

    /// The kernels.
    pub(crate) fn kernels(&self) -> &Kernels {
        &self.kernels
    }

    /// The stream that computes.
    pub(crate) fn stream(&self) -> &Arc<CudaStream> {
        self.queue.stream()
    }

    /// The events of the pass, to read.
    pub(super) fn clock(&self) -> Ref<'_, EventClock> {
        self.clock.borrow()
    }

    /// The events of the pass, to record one.
    pub(super) fn clock_mut(&self) -> RefMut<'_, EventClock> {
        self.clock.borrow_mut()
    }

    /// Another stream, which waits for none.
    ///
    /// # Errors
    /// The driver has none left.
    pub(crate) fn new_stream(&self) -> Result<Arc<CudaStream>> {
        let stream = self.context.new_stream();
        stream.map_err(|source| Error::driver("a new stream", source))
    }

    /// An event that tells the time.
    ///
    /// # Errors
    /// The driver has none left.
    pub(crate) fn event(&self) -> Result<CudaEvent> {
        let flags = sys::CUevent_flags::CU_EVENT_DEFAULT;
        let event = self.context.new_event(Some(flags));
        event.map_err(|source| Error::driver("a new event", source))
    }

    /// Memory of the GPU.
    ///
    /// # Errors
    /// There is not enough, or not enough under the limit.
    pub(crate) fn alloc(&self, bytes: usize) -> Result<DeviceBuffer> {
        DeviceBuffer::new(&self.queue, bytes)
    }

    /// Memory for a row of `n_in` activations, quantized: `before` if it is large enough. None if there is not enough.
    pub(crate) fn quantized_row(
        &self,
        n_in: usize,
        before: Option<DeviceBuffer>,
    ) -> Option<DeviceBuffer> {
        let bytes = Kernels::scratch_size(1, n_in);
        match before {
            Some(buffer) if buffer.size_bytes() >= bytes => Some(buffer),
            _ => self.alloc(bytes).ok(),
        }
    }

    /// Memory of the host that copies to and from the GPU run fastest with, zeros.
    ///
    /// # Errors
    /// The system has no memory to spare.
    pub(crate) fn pinned(&self, bytes: usize) -> Result<Pinned> {
        Pinned::new(&self.context, bytes)
    }

    /// Has the GPU read mapped memory by itself, as long as the result lives.
    ///
    /// # Errors
    /// The driver does not register such memory.
    pub(crate) fn register<'m>(&self, bytes: &'m [u8]) -> Result<Registered<'m>> {
        Registered::new(&self.context, bytes)
    }

    /// Bytes in use, most that were in use at once, and those that may be.
    pub fn memory(&self) -> (u64, u64, u64) {
        let account = self.queue.account();
        (account.used(), account.peak(), account.limit())
    }

    /// Copies values to the GPU, in the order of its stream. They may change once this returns, unless they are pinned.
    ///
    /// # Errors
    /// The copy failed.
    pub(crate) fn upload<T: IntoBytes + Immutable + ?Sized>(
        &self,
        to: Ptr,
        values: &T,
    ) -> Result<()> {
        self.kernels.follow_copy();
        upload_on(self.stream(), to, values.as_bytes())
    }

    /// Begins to copy `n` bytes to the place `at` of pinned memory; they are there once the stream has come so far.
    ///
    /// # Safety
    /// As [`Pinned::begin_download`].
    ///
    /// # Errors
    /// The copy cannot be started.
    pub(super) unsafe fn begin_download(
        &self,
        from: Ptr,
        to: &Pinned,
        at: usize,
        n: usize,
    ) -> Result<()> {
        self.kernels.follow_copy();
        // SAFETY: by the caller's promise.
        unsafe { to.begin_download(self.stream(), from, at, n) }
    }

    /// Copies the first `bytes` of memory on another GPU to memory on this one. The current operation starts when the copy has ended.
    ///
    /// # Errors
    /// The copy cannot be started.
    pub(crate) fn receive(
        &self,
        from: &DeviceBuffer,
        to: &DeviceBuffer,
        bytes: usize,
    ) -> Result<()> {
        to.copy_from(from, bytes)?;
        // Before the other GPU waits for the copy, so that whatever it runs next is after this event.
        let recorded = self.clock_mut().receive(self, from.gpu());
        from.wait_for(to)?;
        recorded
    }

    /// Has what this GPU is given next start after all that `other` was given so far.
    ///
    /// # Errors
    /// The driver's.
    pub(crate) fn follow(&self, other: &Gpu) -> Result<()> {
        self.queue.follow(&other.queue)
    }

    /// Bytes that its memory moves in a second, read and written, in copies of `bytes`: what the reading of weights is held
    /// against.
    ///
    /// # Errors
    /// There is no room for two such buffers, or the GPU failed.
    pub fn bandwidth(&self, bytes: usize) -> Result<f64> {
        let (from, to) = (self.alloc(bytes)?, self.alloc(bytes)?);
        let (begin, end) = (self.event()?, self.event()?);
        let failed = |source| Error::driver("a copy on the GPU", source);
        let mut best = f32::INFINITY;
        for _ in 0..5 {
            begin.record(self.stream()).map_err(failed)?;
            let stream = self.stream().cu_stream();
            // SAFETY: both buffers have as many bytes.
            unsafe { result::memcpy_dtod_async(to.ptr().0, from.ptr().0, bytes, stream) }
                .map_err(failed)?;
            end.record(self.stream()).map_err(failed)?;
            best = best.min(begin.elapsed_ms(&end).map_err(failed)?);
        }
        Ok(2.0 * bytes as f64 / f64::from(best) * 1e3)
    }

    /// Waits for all that was launched.
    ///
    /// # Errors
    /// Some of it failed.
    pub(crate) fn synchronize(&self) -> Result<()> {
        self.queue.wait()
    }

    /// Times that the host has waited for the stream that computes.
    pub fn waits(&self) -> u64 {
        self.queue.account().waits()
    }
}

/// Copies bytes to the GPU on a stream. Kernels that are launched behind it on the same stream have to be [told](Kernels::follow_copy).
///
/// # Errors
/// The copy failed.
pub(super) fn upload_on(stream: &CudaStream, to: Ptr, bytes: &[u8]) -> Result<()> {
    bind(stream.context())?;
    // SAFETY: the caller has room at `to`; memory that is not pinned is read before the call returns, pinned memory lives as
    // long as the session.
    unsafe { result::memcpy_htod_async(to.0, bytes, stream.cu_stream()) }
        .map_err(|source| Error::driver("a copy to the GPU", source))
}
