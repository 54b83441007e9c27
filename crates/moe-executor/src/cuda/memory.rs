//! GPU memory with a limit, and CPU memory that the GPU accesses directly.

use std::ffi::c_void;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use cudarc::driver::{CudaContext, CudaSlice, CudaStream, result, sys};

use super::queue::{Queue, bind};
use super::{Error, Ptr, Result};

/// Allocated bytes and their limit, and the number of times that the CPU waited for the GPU.
#[derive(Debug)]
pub(super) struct Account {
    used: AtomicU64,
    peak: AtomicU64,
    limit: u64,
    waits: AtomicU64,
}

impl Account {
    pub(super) fn new(limit: u64) -> Account {
        Account {
            used: AtomicU64::new(0),
            peak: AtomicU64::new(0),
            limit,
            waits: AtomicU64::new(0),
        }
    }

    /// Counts a wait of the CPU.
    pub(super) fn waited(&self) {
        self.waits.fetch_add(1, Ordering::Relaxed);
    }

    /// Number of waits of the CPU.
    pub(super) fn waits(&self) -> u64 {
        self.waits.load(Ordering::Relaxed)
    }

    /// Allocated bytes.
    pub(super) fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Peak of the allocated bytes.
    pub(super) fn peak(&self) -> u64 {
        self.peak.load(Ordering::Relaxed)
    }

    /// Limit of the allocated bytes.
    pub(super) fn limit(&self) -> u64 {
        self.limit
    }

    /// Counts `bytes` as allocated.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if the limit would be exceeded. Then nothing is counted.
    fn take(&self, bytes: u64) -> Result<()> {
        let fits = |used: u64| used.checked_add(bytes).filter(|&used| used <= self.limit);
        let order = Ordering::Relaxed;
        match self.used.fetch_update(order, order, fits) {
            Ok(before) => {
                self.peak.fetch_max(before + bytes, order);
                Ok(())
            }
            Err(used) => Err(Error::OutOfMemory {
                wanted: bytes,
                used,
                limit: self.limit,
            }),
        }
    }

    /// Counts `bytes` as free again.
    fn release(&self, bytes: u64) {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// GPU memory. All copies and kernels that access it are ordered by one stream.
pub struct DeviceBuffer {
    slice: CudaSlice<u8>,
    ptr: Ptr,
    queue: Arc<Queue>,
}

impl DeviceBuffer {
    pub(super) fn new(queue: &Arc<Queue>, bytes: usize) -> Result<DeviceBuffer> {
        let (stream, account) = (queue.stream(), queue.account());
        account.take(bytes as u64)?;
        // SAFETY: the memory is uninitialized. Only kernels and copies access it, for which every bit pattern is a valid value.
        let slice = unsafe { stream.alloc::<u8>(bytes) };
        let slice = slice.map_err(|source| {
            account.release(bytes as u64);
            Error::driver("allocating GPU memory", source)
        })?;
        use cudarc::driver::DevicePtr as _;
        let ptr = Ptr(slice.device_ptr(stream).0);
        Ok(DeviceBuffer {
            slice,
            ptr,
            queue: queue.clone(),
        })
    }

    /// Address of the first byte.
    pub fn ptr(&self) -> Ptr {
        self.ptr
    }

    /// Size in bytes.
    pub fn size_bytes(&self) -> usize {
        self.slice.num_bytes()
    }

    /// Copies its first bytes to `out` after all work so far, and waits for the copy.
    ///
    /// # Errors
    /// The copy or earlier work on the stream failed.
    pub fn download(&self, out: &mut [u8]) -> Result<()> {
        let out_len = out.len().min(self.size_bytes());
        let stream = self.queue.stream();
        self.queue.bind()?;
        // SAFETY: the length is at most the size of either side, and the wait below ends before the borrow of `out`.
        unsafe { result::memcpy_dtoh_async(&mut out[..out_len], self.ptr.0, stream.cu_stream()) }
            .map_err(|source| Error::driver("a D2H copy", source))?;
        self.queue.wait()
    }

    /// Index of its GPU in the list.
    pub(super) fn gpu(&self) -> usize {
        self.queue.gpu()
    }

    /// Starts a copy of the first bytes of memory on another GPU to the first bytes of this memory, after everything the stream
    /// of the other GPU was given so far. Then `other` must [wait](DeviceBuffer::wait_for) for this memory.
    ///
    /// # Errors
    /// The copy cannot be started.
    pub(super) fn copy_from(&self, other: &DeviceBuffer, bytes: usize) -> Result<()> {
        let bytes = bytes.min(self.size_bytes()).min(other.size_bytes());
        // SAFETY: `bytes` is at most the size of either buffer.
        unsafe {
            self.queue
                .copy_from(&other.queue, other.ptr, self.ptr, bytes)
        }
    }

    /// Makes the stream of this memory's GPU wait for everything the stream of the GPU of `other` was given so far.
    ///
    /// # Errors
    /// The driver cannot record or wait for an event.
    pub(super) fn wait_for(&self, other: &DeviceBuffer) -> Result<()> {
        self.queue.follow(&other.queue)
    }

    /// Returns a larger buffer with the first `kept` bytes of this one, and waits for the copy.
    ///
    /// # Errors
    /// The allocation or the copy failed.
    pub(crate) fn grown(&self, bytes: usize, kept: usize) -> Result<DeviceBuffer> {
        let stream = self.queue.stream();
        let grown = DeviceBuffer::new(&self.queue, bytes)?;
        let kept = kept.min(self.size_bytes());
        // SAFETY: both buffers have at least `kept` bytes, and the stream frees this one after the copy.
        unsafe { result::memcpy_dtod_async(grown.ptr.0, self.ptr.0, kept, stream.cu_stream()) }
            .map_err(|source| Error::driver("a D2D copy", source))?;
        // Growing is rare, and no kernel may start before the copy has ended.
        self.queue.wait()?;
        Ok(grown)
    }

    /// Sets a range of its bytes to 0 after all work so far, and waits for it.
    ///
    /// # Errors
    /// The driver fails, or earlier work on the stream failed.
    pub(crate) fn clear(&self, bytes: Range<usize>) -> Result<()> {
        let end = bytes.end.min(self.size_bytes());
        let start = bytes.start.min(end);
        let stream = self.queue.stream();
        self.queue.bind()?;
        let at = self.ptr.offset(start).0;
        // SAFETY: the range is within the buffer, whose memory the stream orders.
        unsafe { result::memset_d8_async(at, 0, end - start, stream.cu_stream()) }
            .map_err(|source| Error::driver("clearing GPU memory", source))?;
        // Sequences start rarely, and no kernel may start before.
        self.queue.wait()
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        self.queue.account().release(self.size_bytes() as u64);
        // The driver frees memory of the current context only. The next call returns the error, if any.
        let context = self.queue.stream().context();
        context.record_err(context.bind_to_thread());
    }
}

/// Pinned CPU memory: copies run at full PCIe bandwidth and asynchronously.
pub struct Pinned {
    context: Arc<CudaContext>,
    address: *mut c_void,
    bytes: usize,
}

impl Pinned {
    pub(super) fn new(context: &Arc<CudaContext>, bytes: usize) -> Result<Pinned> {
        bind(context)?;
        // SAFETY: the context is current on this thread. `drop` frees the memory once.
        let address = unsafe { result::malloc_host(bytes.max(1), 0) }
            .map_err(|source| Error::driver("allocating pinned memory", source))?;
        // SAFETY: at least `bytes` bytes were allocated at `address`.
        unsafe { std::ptr::write_bytes(address.cast::<u8>(), 0, bytes) };
        Ok(Pinned {
            context: context.clone(),
            address,
            bytes,
        })
    }

    /// Size in bytes.
    pub(super) fn len(&self) -> usize {
        self.bytes
    }

    /// Address of the first byte. It is the same on the CPU and on GPUs.
    pub(super) fn ptr(&self) -> Ptr {
        Ptr(self.address as u64)
    }

    /// The bytes.
    ///
    /// # Safety
    /// No copy into the memory is in flight, and none is started during the lifetime of the result.
    pub(super) unsafe fn bytes(&self) -> &[u8] {
        // SAFETY: `new` allocated and initialized the bytes, and the caller ensures that nothing writes to them.
        unsafe { std::slice::from_raw_parts(self.address.cast(), self.bytes) }
    }

    /// Overwrites the first bytes.
    ///
    /// # Safety
    /// No copy into or from the memory is in flight.
    pub(super) unsafe fn write(&mut self, bytes: &[u8]) {
        assert!(bytes.len() <= self.bytes, "pinned memory is too small");
        // SAFETY: both have at least `bytes.len()` bytes, they do not overlap, and the caller ensures that no copy is in flight.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.address.cast(), bytes.len());
        }
    }

    /// The 32-bit values, which a GPU may read and write at the same time.
    pub(super) fn words(&self) -> &[AtomicU32] {
        // SAFETY: `new` allocated and initialized the bytes, page-aligned. Accesses of the CPU are atomic; a GPU accesses aligned words
        // only.
        unsafe { std::slice::from_raw_parts(self.address.cast(), self.bytes / 4) }
    }

    /// Starts a D2H copy of `n` bytes to byte `at` of this memory on `stream`.
    ///
    /// # Safety
    /// This memory is not read or written until `stream` has completed the copy, and `n` bytes are allocated at `from`.
    ///
    /// # Errors
    /// The copy cannot be started.
    pub(super) unsafe fn begin_download(
        &self,
        stream: &CudaStream,
        from: Ptr,
        at: usize,
        n: usize,
    ) -> Result<()> {
        assert!(
            at.checked_add(n).is_some_and(|end| end <= self.bytes),
            "pinned memory is too small"
        );
        bind(stream.context())?;
        // SAFETY: the assertion above ensures that the offset is within the allocation.
        let to = unsafe { self.address.cast::<u8>().add(at) };
        // SAFETY: `n` bytes are allocated at `to`, and the caller ensures that nothing else accesses them during the copy.
        unsafe { sys::cuMemcpyDtoHAsync_v2(to.cast(), from.0, n, stream.cu_stream()) }
            .result()
            .map_err(|source| Error::driver("a D2H copy", source))
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let _ = self.context.synchronize();
        // SAFETY: `new` allocated the memory, and no copy is in flight after the wait. An error cannot be returned from `drop`.
        let _ = unsafe { result::free_host(self.address) };
    }
}

/// Mapped memory of a file that GPUs read directly.
pub struct Registered<'m> {
    context: Arc<CudaContext>,
    address: *mut c_void,
    mapped: PhantomData<&'m [u8]>,
}

impl<'m> Registered<'m> {
    /// Registers `bytes` for all GPUs.
    ///
    /// # Errors
    /// The driver cannot register such memory.
    pub(super) fn new(context: &Arc<CudaContext>, bytes: &'m [u8]) -> Result<Registered<'m>> {
        bind(context)?;
        let address = bytes.as_ptr().cast_mut().cast::<c_void>();
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_READ_ONLY;
        // SAFETY: the bytes stay mapped while `'m` lives, which outlives the result. They are registered as read-only.
        unsafe { sys::cuMemHostRegister_v2(address, bytes.len(), flags) }
            .result()
            .map_err(|source| Error::driver("registering mapped memory", source))?;
        Ok(Registered {
            context: context.clone(),
            address,
            mapped: PhantomData,
        })
    }
}

impl Drop for Registered<'_> {
    fn drop(&mut self) {
        let _ = self.context.synchronize();
        // SAFETY: `new` registered the memory, and no copy is in flight after the wait. An error cannot be returned from `drop`.
        let _ = unsafe { sys::cuMemHostUnregister(self.address) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rejects_allocations_beyond_the_limit() {
        let account = Account::new(100);
        account.take(60).unwrap();
        for bytes in [41, u64::MAX, u64::MAX - 60] {
            let refused = account.take(bytes);
            let of = |error| match error {
                Error::OutOfMemory {
                    wanted,
                    used,
                    limit,
                } => (wanted, used, limit),
                other => panic!("{other}"),
            };
            assert_eq!(refused.map_err(of), Err((bytes, 60, 100)));
        }
        account.take(40).unwrap();
        account.release(100);
        assert_eq!((account.used(), account.peak()), (0, 100));
    }

    #[test]
    fn concurrent_allocations_never_exceed_the_limit() {
        const LIMIT: u64 = 3;
        let account = Account::new(LIMIT);
        let most = AtomicU64::new(0);
        let holders = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..20_000 {
                        if account.take(1).is_ok() {
                            let now = holders.fetch_add(1, Ordering::SeqCst) + 1;
                            most.fetch_max(now, Ordering::SeqCst);
                            std::hint::spin_loop();
                            holders.fetch_sub(1, Ordering::SeqCst);
                            account.release(1);
                        }
                    }
                });
            }
        });
        let most = most.into_inner();
        assert!((1..=LIMIT).contains(&most), "{most} at once");
        assert_eq!(account.used(), 0);
        assert!(account.peak() <= LIMIT, "{}", account.peak());
    }
}
