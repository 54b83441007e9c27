//! Values that the host, GPUs or both hold. They are copied when a device asks for them, and not before.

use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::cuda::{DeviceBuffer, Gpu, Ptr, Result, Wanted};
use crate::placement::DeviceId;

/// What can be moved as plain bytes.
pub trait Plain: FromBytes + IntoBytes + Immutable + Copy + Default {}

impl<T: FromBytes + IntoBytes + Immutable + Copy + Default> Plain for T {}

/// One value for each GPU that has one, by the GPU's index.
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

    /// Gives a GPU a value, or takes its value away. Returns the one before.
    pub fn set(&mut self, gpu: usize, value: Option<T>) -> Option<T> {
        if self.0.len() <= gpu {
            self.0.resize_with(gpu + 1, || None);
        }
        std::mem::replace(&mut self.0[gpu], value)
    }

    /// All values with the index of their GPU.
    pub fn iter(&self) -> impl Iterator<Item = (usize, &T)> {
        let values = self.0.iter().enumerate();
        values.filter_map(|(gpu, value)| Some((gpu, value.as_ref()?)))
    }
}

/// Devices that hold the values as they were written last.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Fresh(u32);

impl Fresh {
    /// One device. As many GPUs as [`MAX_GPUS`](crate::devices::MAX_GPUS) have a bit.
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

/// A vector on the host with a twin on each GPU that asked for it.
pub struct Mirrored<T> {
    host: Vec<T>,
    twins: PerGpu<DeviceBuffer>,
    fresh: Fresh,
    /// The device that wrote the values last.
    writer: DeviceId,
    /// How often somebody was given the values to write.
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
            twins: PerGpu::default(),
            fresh: Fresh::only(DeviceId::Cpu),
            writer: DeviceId::Cpu,
            written: 0,
        }
    }
}

impl<T: Plain> Mirrored<T> {
    /// Makes it `n` values, contents unspecified. Allocates only to grow beyond any earlier size.
    pub(crate) fn resize(&mut self, n: usize) {
        self.host.resize(n, T::default());
    }

    /// Makes it at least `n` values and keeps those that are there. Where a GPU has no room for more they come back to the
    /// host.
    ///
    /// # Errors
    /// The GPU failed, now or in what was launched before.
    pub(crate) fn grow(&mut self, n: usize) -> Result<()> {
        let old = self.host.len();
        if n <= old {
            return Ok(());
        }
        for gpu in 0..self.twins.0.len() {
            let is_fresh = self.fresh.has(DeviceId::Gpu(gpu));
            let twin = self.twins.get(gpu).filter(|_| is_fresh);
            let grown = twin.and_then(|twin| {
                let grown = twin.grown(n * size_of::<T>(), old * size_of::<T>());
                grown.ok()
            });
            if is_fresh && grown.is_none() {
                self.fetch()?;
                self.fresh.remove(DeviceId::Gpu(gpu));
            }
            self.twins.set(gpu, grown);
        }
        self.host.resize(n, T::default());
        Ok(())
    }

    /// Number of values.
    pub fn len(&self) -> usize {
        self.host.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.host.is_empty()
    }

    /// Where the values are: on the host if it has them, else on the GPU that wrote them, from which the host must fetch
    /// them before it reads them.
    pub(crate) fn home(&self) -> DeviceId {
        if self.fresh.has(DeviceId::Cpu) {
            DeviceId::Cpu
        } else {
            self.writer
        }
    }

    /// The memory on the GPU from which the host must fetch the values, if it must.
    fn remote(&self) -> Option<&DeviceBuffer> {
        match self.home() {
            DeviceId::Gpu(gpu) => self.twins.get(gpu),
            DeviceId::Cpu => None,
        }
    }

    /// Fetches the values if only GPUs hold them, and waits for them.
    ///
    /// # Errors
    /// The GPU failed, now or in what was launched before.
    pub(crate) fn fetch(&mut self) -> Result<()> {
        if let DeviceId::Gpu(gpu) = self.home()
            && let Some(twin) = self.twins.get(gpu)
        {
            twin.download(self.host.as_mut_bytes())?;
            self.fresh.add(DeviceId::Cpu);
        }
        Ok(())
    }

    /// The copy that would bring the values from `device` to the host, if that is their home and a GPU. Whoever makes it says so
    /// by [`Mirrored::fetched`].
    pub(crate) fn wanted(&mut self, device: DeviceId) -> Option<Wanted<'_>> {
        if self.home() != device {
            return None;
        }
        let twin = self.remote()?;
        let (from, size) = (twin.ptr(), twin.size_bytes());
        let bytes = self.host.as_mut_bytes();
        let n = bytes.len().min(size);
        Some(Wanted {
            from,
            to: &mut bytes[..n],
        })
    }

    /// The values that were [wanted](Mirrored::wanted) from `device` are on the host.
    pub(crate) fn fetched(&mut self, device: DeviceId) {
        if self.home() == device {
            self.fresh.add(DeviceId::Cpu);
        }
    }

    /// The values on the host. They must be there: see `Mirrored::fetch`.
    pub fn host(&self) -> &[T] {
        debug_assert!(self.home() == DeviceId::Cpu, "the values are on a GPU");
        &self.host
    }

    /// The values on the host, to write; those of GPUs are no longer read.
    pub(crate) fn host_mut(&mut self) -> &mut Vec<T> {
        self.write(DeviceId::Cpu);
        &mut self.host
    }

    /// The values on a GPU. They are copied from the host if that has them, else from the GPU that wrote them.
    ///
    /// # Errors
    /// It has no room for them, or a copy failed.
    pub(crate) fn device(&mut self, gpu: &Gpu) -> Result<Ptr> {
        let ptr = self.room(gpu)?;
        let device = DeviceId::Gpu(gpu.index());
        if !self.fresh.has(device) {
            match (self.remote(), self.twins.get(gpu.index())) {
                (Some(remote), Some(twin)) => {
                    gpu.receive(remote, twin, size_of_val(&*self.host))?
                }
                _ => gpu.upload(ptr, self.host.as_bytes())?,
            }
            self.fresh.add(device);
        }
        Ok(ptr)
    }

    /// Memory on a GPU whose values are all about to be written there.
    ///
    /// # Errors
    /// It has no room for them.
    pub(crate) fn fill_device(&mut self, gpu: &Gpu) -> Result<Ptr> {
        let ptr = self.room(gpu)?;
        self.write(DeviceId::Gpu(gpu.index()));
        Ok(ptr)
    }

    /// The values on a GPU, some of which are about to be written there.
    ///
    /// # Errors
    /// As [`Mirrored::device`].
    pub(crate) fn update_device(&mut self, gpu: &Gpu) -> Result<Ptr> {
        let ptr = self.device(gpu)?;
        self.write(DeviceId::Gpu(gpu.index()));
        Ok(ptr)
    }

    /// Puts the first `n` values of the host before those that a GPU has behind them.
    ///
    /// # Errors
    /// As [`Mirrored::device`].
    pub(crate) fn join(&mut self, gpu: &Gpu, n: usize) -> Result<()> {
        let ptr = self.room(gpu)?;
        gpu.upload(ptr, &self.host[..n])?;
        self.write(DeviceId::Gpu(gpu.index()));
        Ok(())
    }

    /// A number that is another one after every writing, on any device.
    pub(crate) fn written(&self) -> u64 {
        self.written
    }

    fn write(&mut self, device: DeviceId) {
        (self.fresh, self.writer) = (Fresh::only(device), device);
        self.written += 1;
    }

    /// The memory on the host, for the inventory of buffers.
    pub(crate) fn room_on_host(&self) -> &Vec<T> {
        &self.host
    }

    /// The memory on each GPU, for the inventory of buffers.
    pub(crate) fn room_on_gpus(&self) -> &PerGpu<DeviceBuffer> {
        &self.twins
    }

    /// Address of the values as they were written last.
    pub(crate) fn address(&self) -> u64 {
        let remote = self.remote().map(|twin| twin.ptr().0);
        remote.unwrap_or(self.host.as_ptr() as u64)
    }

    fn room(&mut self, gpu: &Gpu) -> Result<Ptr> {
        let bytes = (self.host.len() * size_of::<T>()).max(1);
        let index = gpu.index();
        if let Some(twin) = self.twins.get(index)
            && twin.size_bytes() >= bytes
        {
            return Ok(twin.ptr());
        }
        if self.home() == DeviceId::Gpu(index) {
            self.fetch()?;
        }
        self.twins.set(index, None);
        self.fresh.remove(DeviceId::Gpu(index));
        // Room to grow, so that a longer batch does not come back at once.
        let twin = gpu.alloc(bytes.next_power_of_two())?;
        let ptr = twin.ptr();
        self.twins.set(index, Some(twin));
        Ok(ptr)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fresh_devices_are_counted_apart() {
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
