//! Values with copies on the CPU and on GPUs. A device gets the values when it first needs them.

use std::collections::TryReserveError;
use std::ops::Range;

use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::cuda::{DeviceBuffer, Gpu, Ptr, Result, Wanted};
use crate::device_id::DeviceId;

/// Types that can be copied as plain bytes.
pub trait Plain: FromBytes + IntoBytes + Immutable + Copy + Default {}

impl<T: FromBytes + IntoBytes + Immutable + Copy + Default> Plain for T {}

/// An optional value per GPU, by the GPU's index.
pub(crate) struct PerGpu<T>(Vec<Option<T>>);

impl<T> Default for PerGpu<T> {
    fn default() -> PerGpu<T> {
        PerGpu(Vec::new())
    }
}

impl<T> PerGpu<T> {
    /// The value of a GPU.
    pub fn get(&self, gpu: usize) -> Option<&T> {
        self.0.get(gpu)?.as_ref()
    }

    /// Sets or removes the value of a GPU. Returns the previous value.
    pub fn set(&mut self, gpu: usize, value: Option<T>) -> Option<T> {
        if self.0.len() <= gpu {
            self.0.resize_with(gpu + 1, || None);
        }
        std::mem::replace(&mut self.0[gpu], value)
    }

    /// All values with the indices of their GPUs.
    pub fn iter(&self) -> impl Iterator<Item = (usize, &T)> {
        let values = self.0.iter().enumerate();
        values.filter_map(|(gpu, value)| Some((gpu, value.as_ref()?)))
    }
}

/// The set of devices whose copy has the newest values: bit 0 is the CPU, bit `1 + i` is GPU `i`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Fresh(u32);

impl Fresh {
    /// The set of one device. There are enough bits for [`MAX_GPUS`](crate::devices::MAX_GPUS).
    fn only(device: DeviceId) -> Fresh {
        Fresh(match device {
            DeviceId::Cpu => 1,
            DeviceId::Gpu(index) => 2 << index,
        })
    }

    fn has(self, device: DeviceId) -> bool {
        self.0 & Fresh::only(device).0 != 0
    }

    fn add(&mut self, device: DeviceId) {
        self.0 |= Fresh::only(device).0;
    }

    fn remove(&mut self, device: DeviceId) {
        self.0 &= !Fresh::only(device).0;
    }
}

/// A vector in CPU memory with a copy on each GPU that needed it.
pub struct Mirrored<T> {
    host: Vec<T>,
    gpu_copies: PerGpu<DeviceBuffer>,
    fresh: Fresh,
    /// The device that wrote the values last.
    writer: DeviceId,
    /// Number of writes, on any device.
    written: u64,
}

impl<T> Default for Mirrored<T> {
    fn default() -> Mirrored<T> {
        Mirrored::from(Vec::new())
    }
}

impl<T> From<Vec<T>> for Mirrored<T> {
    fn from(host: Vec<T>) -> Mirrored<T> {
        Mirrored {
            host,
            gpu_copies: PerGpu::default(),
            fresh: Fresh::only(DeviceId::Cpu),
            writer: DeviceId::Cpu,
            written: 0,
        }
    }
}

impl<T: Plain> Mirrored<T> {
    /// Sets the number of values to `n`; their contents are unspecified. Allocates only beyond the largest size so far.
    pub(crate) fn resize(&mut self, n: usize) {
        self.host.reserve_exact(n.saturating_sub(self.host.len()));
        self.host.resize(n, T::default());
    }

    /// Reserves memory on the CPU for exactly `n` values, so that [`Mirrored::grow`] allocates none there.
    ///
    /// # Errors
    /// The memory cannot be allocated.
    pub(crate) fn try_reserve(&mut self, n: usize) -> std::result::Result<(), TryReserveError> {
        let more = n.saturating_sub(self.host.len());
        self.host.try_reserve_exact(more)
    }

    /// Grows to at least `n` values and keeps the existing ones. If a GPU has no memory for the larger size, the values
    /// are copied back to the CPU.
    ///
    /// # Errors
    /// The copy, or an operation launched before it, failed.
    pub(crate) fn grow(&mut self, n: usize) -> Result<()> {
        let old = self.host.len();
        if n <= old {
            return Ok(());
        }
        for gpu in 0..self.gpu_copies.0.len() {
            let is_fresh = self.fresh.has(DeviceId::Gpu(gpu));
            let copy = self.gpu_copies.get(gpu).filter(|_| is_fresh);
            let grown = copy.and_then(|copy| {
                let grown = copy.grown(n * size_of::<T>(), old * size_of::<T>());
                grown.ok()
            });
            if is_fresh && grown.is_none() {
                self.fetch()?;
                self.fresh.remove(DeviceId::Gpu(gpu));
            }
            self.gpu_copies.set(gpu, grown);
        }
        self.host.resize(n, T::default());
        Ok(())
    }

    /// Number of values.
    pub fn len(&self) -> usize {
        self.host.len()
    }

    /// Whether the number of values is 0.
    pub fn is_empty(&self) -> bool {
        self.host.is_empty()
    }

    /// The CPU if it has the newest values, else the GPU that wrote them. In the second case the CPU must fetch the values
    /// before it reads them.
    pub(crate) fn home(&self) -> DeviceId {
        if self.fresh.has(DeviceId::Cpu) {
            DeviceId::Cpu
        } else {
            self.writer
        }
    }

    /// The GPU buffer that the CPU must fetch the values from; `None` if the CPU has them.
    fn remote(&self) -> Option<&DeviceBuffer> {
        match self.home() {
            DeviceId::Gpu(gpu) => self.gpu_copies.get(gpu),
            DeviceId::Cpu => None,
        }
    }

    /// Copies the values to the CPU if only GPUs have them, and waits for the copy.
    ///
    /// # Errors
    /// The copy, or an operation launched before it, failed.
    pub(crate) fn fetch(&mut self) -> Result<()> {
        if let DeviceId::Gpu(gpu) = self.home()
            && let Some(copy) = self.gpu_copies.get(gpu)
        {
            copy.download(self.host.as_mut_bytes())?;
            self.fresh.add(DeviceId::Cpu);
        }
        Ok(())
    }

    /// The D2H copy that the CPU needs, if the home of the values is `device` and `device` is a GPU. The caller makes the
    /// copy and then calls [`Mirrored::fetched`].
    pub(crate) fn wanted(&mut self, device: DeviceId) -> Option<Wanted<'_>> {
        if self.home() != device {
            return None;
        }
        let copy = self.remote()?;
        let (from, size) = (copy.ptr(), copy.size_bytes());
        let bytes = self.host.as_mut_bytes();
        let n = bytes.len().min(size);
        Some(Wanted {
            from,
            to: &mut bytes[..n],
        })
    }

    /// Notes that the copy of [`Mirrored::wanted`] from `device` is complete.
    pub(crate) fn fetched(&mut self, device: DeviceId) {
        if self.home() == device {
            self.fresh.add(DeviceId::Cpu);
        }
    }

    /// The values in CPU memory. They must be there: see `Mirrored::fetch`.
    pub fn host(&self) -> &[T] {
        debug_assert!(self.home() == DeviceId::Cpu, "the values are on a GPU");
        &self.host
    }

    /// The values in CPU memory, mutable. Copies on GPUs become stale.
    pub(crate) fn host_mut(&mut self) -> &mut Vec<T> {
        self.write(DeviceId::Cpu);
        &mut self.host
    }

    /// Address of the values on a GPU. They are copied from the CPU if it has them, else from the GPU that wrote them.
    ///
    /// # Errors
    /// The GPU has no memory for them, or a copy failed.
    pub(crate) fn device(&mut self, gpu: &Gpu) -> Result<Ptr> {
        let ptr = self.reserve(gpu)?;
        let device = DeviceId::Gpu(gpu.index());
        if !self.fresh.has(device) {
            match (self.remote(), self.gpu_copies.get(gpu.index())) {
                (Some(remote), Some(copy)) => {
                    gpu.receive(remote, copy, size_of_val(&*self.host))?
                }
                _ => gpu.upload(ptr, self.host.as_bytes())?,
            }
            self.fresh.add(device);
        }
        Ok(ptr)
    }

    /// Address of memory on a GPU for an operation that writes all values there.
    ///
    /// # Errors
    /// The GPU has no memory for them.
    pub(crate) fn fill_device(&mut self, gpu: &Gpu) -> Result<Ptr> {
        let ptr = self.reserve(gpu)?;
        self.write(DeviceId::Gpu(gpu.index()));
        Ok(ptr)
    }

    /// Address of the values on a GPU for an operation that writes some of them there.
    ///
    /// # Errors
    /// Like [`Mirrored::device`].
    pub(crate) fn update_device(&mut self, gpu: &Gpu) -> Result<Ptr> {
        let ptr = self.device(gpu)?;
        self.write(DeviceId::Gpu(gpu.index()));
        Ok(ptr)
    }

    /// Copies the first `n` values from the CPU to a GPU, whose values from index `n` on stay. The GPU then has the newest
    /// values.
    ///
    /// # Errors
    /// Like [`Mirrored::device`].
    pub(crate) fn join(&mut self, gpu: &Gpu, n: usize) -> Result<()> {
        let ptr = self.reserve(gpu)?;
        gpu.upload(ptr, &self.host[..n])?;
        self.write(DeviceId::Gpu(gpu.index()));
        Ok(())
    }

    /// Sets a range of the values to 0 on the device that has the newest values.
    ///
    /// # Errors
    /// The device is a GPU, and the driver fails.
    pub(crate) fn clear(&mut self, range: Range<usize>) -> Result<()> {
        if let DeviceId::Gpu(gpu) = self.home()
            && let Some(copy) = self.gpu_copies.get(gpu)
        {
            copy.clear(range.start * size_of::<T>()..range.end * size_of::<T>())?;
            self.write(DeviceId::Gpu(gpu));
        } else {
            self.host_mut()[range].fill(T::default());
        }
        Ok(())
    }

    /// Number of writes so far, on any device: it changes whenever the values may have changed.
    pub(crate) fn written(&self) -> u64 {
        self.written
    }

    fn write(&mut self, device: DeviceId) {
        (self.fresh, self.writer) = (Fresh::only(device), device);
        self.written += 1;
    }

    /// The memory on the CPU, for the inventory of buffers. The values in it may be stale.
    pub(crate) fn cpu_memory(&self) -> &Vec<T> {
        &self.host
    }

    /// The memory on each GPU, for the inventory of buffers. The values in it may be stale.
    pub(crate) fn gpu_memory(&self) -> &PerGpu<DeviceBuffer> {
        &self.gpu_copies
    }

    /// Address of the newest values.
    pub(crate) fn address(&self) -> u64 {
        let remote = self.remote().map(|copy| copy.ptr().0);
        remote.unwrap_or(self.host.as_ptr() as u64)
    }

    /// Address of memory on a GPU that is large enough for all values; allocates it if necessary.
    fn reserve(&mut self, gpu: &Gpu) -> Result<Ptr> {
        // A power of two, so that slightly longer batches do not allocate again.
        self.allocate(gpu, usize::next_power_of_two)
    }

    /// Reserves memory on a GPU for all values and no more.
    ///
    /// # Errors
    /// The GPU has no memory for them, or a copy failed.
    pub(crate) fn reserve_exact(&mut self, gpu: &Gpu) -> Result<()> {
        self.allocate(gpu, |bytes| bytes).map(drop)
    }

    /// Address of memory on a GPU that is large enough for all values. If necessary, allocates the bytes that `size` returns
    /// for the bytes of the values.
    fn allocate(&mut self, gpu: &Gpu, size: impl FnOnce(usize) -> usize) -> Result<Ptr> {
        let bytes = (self.host.len() * size_of::<T>()).max(1);
        let index = gpu.index();
        if let Some(copy) = self.gpu_copies.get(index)
            && copy.size_bytes() >= bytes
        {
            return Ok(copy.ptr());
        }
        if self.home() == DeviceId::Gpu(index) {
            self.fetch()?;
        }
        self.gpu_copies.set(index, None);
        self.fresh.remove(DeviceId::Gpu(index));
        let copy = gpu.alloc(size(bytes))?;
        let ptr = copy.ptr();
        self.gpu_copies.set(index, Some(copy));
        Ok(ptr)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fresh_set_distinguishes_devices() {
        let [cpu, first, second] = [DeviceId::Cpu, DeviceId::Gpu(0), DeviceId::Gpu(1)];
        let mut fresh = Fresh::only(second);
        fresh.add(cpu);
        assert_eq!(
            [cpu, first, second].map(|device| fresh.has(device)),
            [true, false, true]
        );
        fresh.remove(second);
        assert_eq!(fresh, Fresh::only(cpu));
    }
}
