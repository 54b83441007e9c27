//! A GPU of the list: compute stream, kernels, memory and event clock.

use std::cell::{Ref, RefCell, RefMut};
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError, result, sys};
use zerocopy::{Immutable, IntoBytes};

use super::clock::EventClock;
use super::launch::Kernels;
use super::queue::{Queue, bind};
use super::{DeviceBuffer, Error, GpuInfo, GpuSpec, Pinned, Ptr, Registered, Result};

/// The first CUDA version whose driver loads the PTX of the kernels (ISA 8.4).
const OLDEST_DRIVER: i32 = 12040;

/// An entry in the list of GPUs. Entries for the same physical GPU share only its hardware and its context.
pub struct Gpu {
    /// Index in the list.
    index: usize,
    context: Arc<CudaContext>,
    /// The compute stream.
    queue: Arc<Queue>,
    kernels: Kernels,
    clock: RefCell<EventClock>,
    info: GpuInfo,
}

impl Gpu {
    /// Checks whether this machine has a driver and a GPU.
    ///
    /// # Errors
    /// [`Error::NoDriver`], [`Error::NoDevice`], or a driver error.
    pub fn detect() -> Result<()> {
        // SAFETY: loads the driver library and calls nothing in it. The initializers of the library are sound.
        if !unsafe { sys::is_culib_present() } {
            return Err(Error::NoDriver);
        }
        match CudaContext::device_count() {
            Ok(0) | Err(DriverError(sys::CUresult::CUDA_ERROR_NO_DEVICE)) => Err(Error::NoDevice),
            Ok(_) => Ok(()),
            Err(source) => Err(Error::driver("counting GPUs", source)),
        }
    }

    /// Opens the GPUs of a list. If a physical GPU is listed more than once, entries without a limit get equal shares of its free
    /// memory.
    ///
    /// # Errors
    /// A GPU does not exist, the driver cannot open it, or the GPU or the driver is too old for the kernels.
    pub fn open_all(specs: &[GpuSpec]) -> Result<Vec<Gpu>> {
        Gpu::detect()?;
        let failed = |source| Error::driver("opening the GPU", source);
        let mut driver = 0;
        // SAFETY: the driver writes one integer to `driver`.
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

    /// Opens one of `entries` entries for a physical GPU.
    fn open(index: usize, spec: &GpuSpec, entries: u64, driver: i32) -> Result<Gpu> {
        let failed = |source| Error::driver("opening the GPU", source);
        let context = CudaContext::new(spec.ordinal).map_err(failed)?;
        // SAFETY: this crate orders streams with its own events. cudarc's tracking would cost a driver call per buffer and use.
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
            queue: Queue::new(index, &context, limit.min(free as u64), kernels.launches())?,
            kernels,
            clock: RefCell::default(),
            context,
            info,
        })
    }

    /// Index in the list of GPUs.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Properties of the GPU.
    pub fn info(&self) -> &GpuInfo {
        &self.info
    }

    /// The kernels.
    pub(crate) fn kernels(&self) -> &Kernels {
        &self.kernels
    }

    /// The compute stream, for anything but launches.
    pub(crate) fn stream(&self) -> &Arc<CudaStream> {
        self.queue.stream()
    }

    /// The compute stream, for launches.
    pub(crate) fn launch_stream(&self) -> &Arc<CudaStream> {
        self.queue.launch_stream()
    }

    /// Starts a pass of `n_tokens` tokens. If `repeats`, kernels are started as CUDA graphs where the pass repeats an earlier one.
    /// The CPU must not compute next to kernels of the pass.
    pub(super) fn begin_pass(&self, n_tokens: usize, repeats: bool) {
        self.queue.begin_pass(n_tokens, repeats);
    }

    /// Number of CUDA graphs started so far.
    pub fn n_graphs(&self) -> u64 {
        self.kernels.launches().n_graphs()
    }

    /// The events of the pass.
    pub(super) fn clock(&self) -> Ref<'_, EventClock> {
        self.clock.borrow()
    }

    /// The events of the pass, to record more.
    pub(super) fn clock_mut(&self) -> RefMut<'_, EventClock> {
        self.clock.borrow_mut()
    }

    /// Ends the last operation here, if its end is wanted and no kernel has been launched since: something other than a kernel
    /// follows on the compute stream, or another device runs an operation.
    pub(crate) fn end_operation(&self) {
        if self.kernels.launches().stores_start() {
            // After an error, the next kernel marks the end.
            let _ = self.kernels.mark(self.launch_stream());
        }
    }

    /// Makes the next kernel start after everything the compute stream was given so far and after the copy or wait that
    /// follows now.
    pub(super) fn follow_copy(&self) {
        self.end_operation();
        self.kernels.launches().follow_copy();
    }

    /// Creates a stream that is not ordered with the other streams.
    ///
    /// # Errors
    /// The driver cannot create it.
    pub(crate) fn new_stream(&self) -> Result<Arc<CudaStream>> {
        let stream = self.context.new_stream();
        stream.map_err(|source| Error::driver("creating a stream", source))
    }

    /// Creates an event with timing.
    ///
    /// # Errors
    /// The driver cannot create it.
    pub(crate) fn event(&self) -> Result<CudaEvent> {
        let flags = sys::CUevent_flags::CU_EVENT_DEFAULT;
        let event = self.context.new_event(Some(flags));
        event.map_err(|source| Error::driver("creating an event", source))
    }

    /// Allocates GPU memory.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if the limit is exceeded, or a driver error.
    pub(crate) fn alloc(&self, bytes: usize) -> Result<DeviceBuffer> {
        DeviceBuffer::new(&self.queue, bytes)
    }

    /// Memory for one quantized row of `n_in` activations: `before` if it is large enough. `None` if the allocation fails.
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

    /// Allocates pinned CPU memory, filled with zeros.
    ///
    /// # Errors
    /// The driver cannot allocate it.
    pub(crate) fn pinned(&self, bytes: usize) -> Result<Pinned> {
        Pinned::new(&self.context, bytes)
    }

    /// Registers mapped memory with the driver until the result is dropped, so that the GPU reads it directly.
    ///
    /// # Errors
    /// The driver cannot register such memory.
    pub(crate) fn register<'m>(&self, bytes: &'m [u8]) -> Result<Registered<'m>> {
        Registered::new(&self.context, bytes)
    }

    /// GPU memory in bytes: in use, peak, limit.
    pub fn memory(&self) -> (u64, u64, u64) {
        let account = self.queue.account();
        (account.used(), account.peak(), account.limit())
    }

    /// Starts an H2D copy on the compute stream. The values may change once this returns, unless they are in pinned memory.
    ///
    /// # Errors
    /// The copy cannot be started.
    pub(crate) fn upload<T: IntoBytes + Immutable + ?Sized>(
        &self,
        to: Ptr,
        values: &T,
    ) -> Result<()> {
        self.follow_copy();
        upload_on(self.stream(), to, values.as_bytes())
    }

    /// Starts a copy of `bytes` bytes within the GPU on the compute stream. Both ranges are allocated.
    ///
    /// # Errors
    /// The copy cannot be started.
    pub(crate) fn copy(&self, from: Ptr, to: Ptr, bytes: usize) -> Result<()> {
        self.follow_copy();
        bind(&self.context)?;
        // SAFETY: the caller has allocated both ranges, and the stream orders the copy with all other work on them.
        unsafe { result::memcpy_dtod_async(to.0, from.0, bytes, self.stream().cu_stream()) }
            .map_err(|source| Error::driver("a D2D copy", source))
    }

    /// Starts a D2H copy of `n` bytes to byte `at` of pinned memory on the compute stream.
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
        self.follow_copy();
        // SAFETY: the caller ensures it.
        unsafe { to.begin_download(self.stream(), from, at, n) }
    }

    /// Copies the first `bytes` of memory on another GPU to memory on this one. The current operation starts when the copy has
    /// ended.
    ///
    /// # Errors
    /// The copy cannot be started.
    pub(crate) fn receive(
        &self,
        from: &DeviceBuffer,
        to: &DeviceBuffer,
        bytes: usize,
    ) -> Result<()> {
        self.end_operation();
        to.copy_from(from, bytes)?;
        // Before the other GPU waits for the copy, so that whatever it runs next is after this event.
        let recorded = self.clock_mut().receive(self, from.gpu());
        from.wait_for(to)?;
        recorded
    }

    /// Makes the compute stream wait for everything the compute stream of `other` was given so far.
    ///
    /// # Errors
    /// The driver cannot record or wait for an event.
    pub(crate) fn follow(&self, other: &Gpu) -> Result<()> {
        self.end_operation();
        self.queue.follow(&other.queue)
    }

    /// Measured memory bandwidth in bytes/s: reads plus writes of the fastest of five D2D copies of `bytes` bytes. It is the upper
    /// limit for kernels that read weights.
    ///
    /// # Errors
    /// Two buffers of `bytes` do not fit into GPU memory, or the GPU failed.
    pub fn bandwidth(&self, bytes: usize) -> Result<f64> {
        let (from, to) = (self.alloc(bytes)?, self.alloc(bytes)?);
        let (start, end) = (self.event()?, self.event()?);
        let failed = |source| Error::driver("a D2D copy", source);
        let mut best = f32::INFINITY;
        for _ in 0..5 {
            start.record(self.stream()).map_err(failed)?;
            let stream = self.stream().cu_stream();
            // SAFETY: both buffers have `bytes` bytes.
            unsafe { result::memcpy_dtod_async(to.ptr().0, from.ptr().0, bytes, stream) }
                .map_err(failed)?;
            end.record(self.stream()).map_err(failed)?;
            best = best.min(start.elapsed_ms(&end).map_err(failed)?);
        }
        Ok(2.0 * bytes as f64 / f64::from(best) * 1e3)
    }

    /// Waits until the compute stream has completed its work.
    ///
    /// # Errors
    /// Some of the work failed.
    pub(crate) fn synchronize(&self) -> Result<()> {
        self.end_operation();
        self.queue.wait()
    }

    /// Number of times that the CPU has waited for the compute stream so far.
    pub fn waits(&self) -> u64 {
        self.queue.account().waits()
    }
}

/// Starts an H2D copy on a stream. If kernels follow on the same stream, the caller calls [`Gpu::follow_copy`] first.
///
/// # Errors
/// The copy cannot be started.
pub(super) fn upload_on(stream: &CudaStream, to: Ptr, bytes: &[u8]) -> Result<()> {
    bind(stream.context())?;
    // SAFETY: the caller has allocated `bytes.len()` bytes at `to`. The driver reads pageable memory before the call returns, and
    // pinned memory lives as long as the session.
    unsafe { result::memcpy_htod_async(to.0, bytes, stream.cu_stream()) }
        .map_err(|source| Error::driver("an H2D copy", source))
}
