//! Memory of the GPU, counted and capped, and memory of the host that it reads and writes by itself.

use std::ffi::c_void;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::{CudaContext, CudaSlice, CudaStream, result, sys};

use super::queue::{Queue, bind};
use super::{Error, Ptr, Result};

/// What is allocated and how much may be, and how often the host waited for the results.
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

    /// Counts a wait of the host.
    pub(super) fn waited(&self) {
        self.waits.fetch_add(1, Ordering::Relaxed);
    }

    /// Times that the host waited.
    pub(super) fn waits(&self) -> u64 {
        self.waits.load(Ordering::Relaxed)
    }

    /// Bytes that are allocated.
    pub(super) fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Most bytes that were allocated at once.
    pub(super) fn peak(&self) -> u64 {
        self.peak.load(Ordering::Relaxed)
    }

    /// Bytes that may be allocated.
    pub(super) fn limit(&self) -> u64 {
        self.limit
    }

    /// Counts `bytes` as allocated, if the limit leaves room for them.
    ///
    /// # Errors
    /// It does not.
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
    fn give_back(&self, bytes: u64) {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// Memory of a GPU. Its contents are copied and written in the order of one stream.
pub struct DeviceBuffer {
    slice: CudaSlice<u8>,
    ptr: Ptr,
    queue: Arc<Queue>,
}

impl DeviceBuffer {
    pub(super) fn new(queue: &Arc<Queue>, bytes: usize) -> Result<DeviceBuffer> {
        let (stream, account) = (queue.stream(), queue.account());
        account.take(bytes as u64)?;
        // SAFETY: whoever reads it has written it before; a kernel that reads what none wrote gets any values, as on the host.
        let slice = unsafe { stream.alloc::<u8>(bytes) };
        let slice = slice.map_err(|source| {
            account.give_back(bytes as u64);
            Error::driver("an allocation of GPU memory", source)
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

    /// Bytes.
    pub fn size_bytes(&self) -> usize {
        self.slice.num_bytes()
    }

    /// Copies its first bytes to the host, once all that was launched before has ended.
    ///
    /// # Errors
    /// The copy failed, or something before it.
    pub fn download(&self, out: &mut [u8]) -> Result<()> {
        let out_len = out.len().min(self.size_bytes());
        let stream = self.queue.stream();
        self.queue.bind()?;
        // SAFETY: as many bytes as both sides have; the wait below ends before `out` can go.
        unsafe { result::memcpy_dtoh_async(&mut out[..out_len], self.ptr.0, stream.cu_stream()) }
            .map_err(|source| Error::driver("a copy from the GPU", source))?;
        self.queue.wait()
    }

    /// Index in the list of the GPU that it is on.
    pub(super) fn gpu(&self) -> usize {
        self.queue.gpu()
    }

    /// Starts a copy of the first bytes of memory on another GPU to the first bytes of this memory, after everything the stream of the
    /// other GPU was given so far. Then `other` must [wait](DeviceBuffer::wait_for) for this memory.
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

    /// A larger buffer with the first `kept` bytes of this one.
    pub(crate) fn grown(&self, bytes: usize, kept: usize) -> Result<DeviceBuffer> {
        let stream = self.queue.stream();
        let grown = DeviceBuffer::new(&self.queue, bytes)?;
        let kept = kept.min(self.size_bytes());
        // SAFETY: both have `kept` bytes, and the stream frees this one after the copy.
        unsafe { result::memcpy_dtod_async(grown.ptr.0, self.ptr.0, kept, stream.cu_stream()) }
            .map_err(|source| Error::driver("a copy on the GPU", source))?;
        // Seldom, and no kernel must start before it has ended.
        self.queue.wait()?;
        Ok(grown)
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        self.queue.account().give_back(self.size_bytes() as u64);
        // The driver takes back memory of the current GPU. An error is that of the next call.
        let context = self.queue.stream().context();
        context.record_err(context.bind_to_thread());
    }
}

/// Memory of the host that stays where it is, so that copies run at the link's full speed and beside other work.
pub struct Pinned {
    context: Arc<CudaContext>,
    address: *mut c_void,
    bytes: usize,
}

impl Pinned {
    pub(super) fn new(context: &Arc<CudaContext>, bytes: usize) -> Result<Pinned> {
        bind(context)?;
        // SAFETY: the context is current on this thread; the memory is given back once, when this is dropped.
        let address = unsafe { result::malloc_host(bytes.max(1), 0) }
            .map_err(|source| Error::driver("an allocation of pinned memory", source))?;
        // SAFETY: as many bytes were allocated.
        unsafe { std::ptr::write_bytes(address.cast::<u8>(), 0, bytes) };
        Ok(Pinned {
            context: context.clone(),
            address,
            bytes,
        })
    }

    /// Number of bytes.
    pub(super) fn len(&self) -> usize {
        self.bytes
    }

    /// The bytes.
    ///
    /// # Safety
    /// No copy into them is under way, and none is started while the result lives.
    pub(super) unsafe fn bytes(&self) -> &[u8] {
        // SAFETY: allocated and set to zero in `new`; nobody writes to them, by the caller's promise.
        unsafe { std::slice::from_raw_parts(self.address.cast(), self.bytes) }
    }

    /// Overwrites the first bytes.
    ///
    /// # Safety
    /// No copy into them or from them is under way.
    pub(super) unsafe fn write(&mut self, bytes: &[u8]) {
        assert!(bytes.len() <= self.bytes, "pinned memory is too small");
        // SAFETY: both have as many bytes, and this memory is nobody else's, by the caller's promise.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.address.cast(), bytes.len());
        }
    }

    /// Begins to copy `n` bytes of the GPU to the place `at`, in the order of `stream`.
    ///
    /// # Safety
    /// This memory is not read or written, nor dropped, until `stream` has come so far.
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
        // SAFETY: in bounds by the assertion above.
        let to = unsafe { self.address.cast::<u8>().add(at) };
        // SAFETY: `n` bytes of this memory, which the caller leaves to the copy.
        unsafe { sys::cuMemcpyDtoHAsync_v2(to.cast(), from.0, n, stream.cu_stream()) }
            .result()
            .map_err(|source| Error::driver("a copy from the GPU", source))
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let _ = self.context.synchronize();
        // SAFETY: allocated in `new`, and no copy is under way any more. Nothing can be done about an error here.
        let _ = unsafe { result::free_host(self.address) };
    }
}

/// Mapped memory of a file that the GPU may read by itself.
pub struct Registered<'m> {
    context: Arc<CudaContext>,
    address: *mut c_void,
    mapped: PhantomData<&'m [u8]>,
}

impl<'m> Registered<'m> {
    /// Registers `bytes` for all GPUs; they stay mapped for longer than this lives.
    ///
    /// # Errors
    /// The driver does not register such memory.
    pub(super) fn new(context: &Arc<CudaContext>, bytes: &'m [u8]) -> Result<Registered<'m>> {
        bind(context)?;
        let address = bytes.as_ptr().cast_mut().cast::<c_void>();
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_READ_ONLY;
        // SAFETY: the bytes are borrowed until this is dropped; they are registered for reading alone.
        unsafe { sys::cuMemHostRegister_v2(address, bytes.len(), flags) }
            .result()
            .map_err(|source| Error::driver("the registration of mapped memory", source))?;
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
        // SAFETY: registered in `new`, and no copy is under way any more. Nothing can be done about an error here.
        let _ = unsafe { sys::cuMemHostUnregister(self.address) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn account_refuses_what_exceeds_the_limit() {
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
        account.give_back(100);
        assert_eq!((account.used(), account.peak()), (0, 100));
    }

    #[test]
    fn threads_never_take_more_than_the_limit() {
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
                            account.give_back(1);
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
