//! Values that the host, the GPU or both hold. They move when somebody asks for them on the other side, and not before.

use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::cuda::{DeviceBuffer, Gpu, Ptr, Result, Wanted};

/// What can be moved as plain bytes.
pub trait Plain: FromBytes + IntoBytes + Immutable + Copy + Default {}

impl<T: FromBytes + IntoBytes + Immutable + Copy + Default> Plain for T {}

/// Where the values are as they were written last.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum Fresh {
    #[default]
    Host,
    Device,
    Both,
}

/// A vector on the host with a twin on the GPU, which is made when it is first asked for.
#[derive(Default)]
pub struct Mirrored<T> {
    host: Vec<T>,
    device: Option<DeviceBuffer>,
    fresh: Fresh,
    /// How often somebody was given the values to write.
    written: u64,
}

impl<T> From<Vec<T>> for Mirrored<T> {
    fn from(host: Vec<T>) -> Mirrored<T> {
        Mirrored {
            host,
            device: None,
            fresh: Fresh::Host,
            written: 0,
        }
    }
}

impl<T: Plain> Mirrored<T> {
    /// Makes it `n` values, contents unspecified. Allocates only to grow beyond any earlier size.
    pub(crate) fn resize(&mut self, n: usize) {
        self.host.resize(n, T::default());
    }

    /// Makes it at least `n` values and keeps those that are there. Where the GPU has no room for more they come back to the
    /// host.
    ///
    /// # Errors
    /// The GPU failed, now or in what was launched before.
    pub(crate) fn grow(&mut self, n: usize) -> Result<()> {
        let old = self.host.len();
        if n <= old {
            return Ok(());
        }
        if let Some(device) = &self.device {
            match device.grown(n * size_of::<T>(), old * size_of::<T>()) {
                Ok(grown) => self.device = Some(grown),
                Err(_) => {
                    self.fetch()?;
                    (self.device, self.fresh) = (None, Fresh::Host);
                }
            }
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

    /// Whether the host must fetch the values before it reads them.
    pub(crate) fn is_on_device_alone(&self) -> bool {
        self.fresh == Fresh::Device
    }

    /// Fetches the values if only the GPU holds them, and waits for them.
    ///
    /// # Errors
    /// The GPU failed, now or in what was launched before.
    pub(crate) fn fetch(&mut self) -> Result<()> {
        if let (Fresh::Device, Some(device)) = (self.fresh, &self.device) {
            device.download(self.host.as_mut_bytes())?;
            self.fresh = Fresh::Both;
        }
        Ok(())
    }

    /// The copy that would bring the values to the host, if only the GPU holds them. Whoever makes it says so by
    /// [`Mirrored::fetched`].
    pub(crate) fn wanted(&mut self) -> Option<Wanted<'_>> {
        let device = self
            .device
            .as_ref()
            .filter(|_| self.fresh == Fresh::Device)?;
        let bytes = self.host.as_mut_bytes();
        let n = bytes.len().min(device.size_bytes());
        Some(Wanted {
            from: device.ptr(),
            to: &mut bytes[..n],
        })
    }

    /// The values that were [wanted](Mirrored::wanted) are on the host.
    pub(crate) fn fetched(&mut self) {
        if self.fresh == Fresh::Device {
            self.fresh = Fresh::Both;
        }
    }

    /// The values on the host. They must be there: see `Mirrored::fetch`.
    pub fn host(&self) -> &[T] {
        debug_assert!(self.fresh != Fresh::Device, "the values are on the GPU");
        &self.host
    }

    /// The values on the host, to write; the GPU's are no longer read.
    pub(crate) fn host_mut(&mut self) -> &mut Vec<T> {
        self.write(Fresh::Host);
        &mut self.host
    }

    /// The values on the GPU.
    ///
    /// # Errors
    /// It has no room for them, or a copy failed.
    pub(crate) fn device(&mut self, gpu: &Gpu) -> Result<Ptr> {
        let ptr = self.room(gpu)?;
        if self.fresh == Fresh::Host {
            gpu.upload(ptr, self.host.as_bytes())?;
            self.fresh = Fresh::Both;
        }
        Ok(ptr)
    }

    /// Memory on the GPU whose values are all about to be written there.
    ///
    /// # Errors
    /// It has no room for them.
    pub(crate) fn fill_device(&mut self, gpu: &Gpu) -> Result<Ptr> {
        let ptr = self.room(gpu)?;
        self.write(Fresh::Device);
        Ok(ptr)
    }

    /// The values on the GPU, some of which are about to be written there.
    ///
    /// # Errors
    /// As [`Mirrored::device`].
    pub(crate) fn update_device(&mut self, gpu: &Gpu) -> Result<Ptr> {
        let ptr = self.device(gpu)?;
        self.write(Fresh::Device);
        Ok(ptr)
    }

    /// Puts the first `n` values of the host before those that the GPU has behind them.
    ///
    /// # Errors
    /// As [`Mirrored::device`].
    pub(crate) fn join(&mut self, gpu: &Gpu, n: usize) -> Result<()> {
        let ptr = self.room(gpu)?;
        gpu.upload(ptr, &self.host[..n])?;
        self.write(Fresh::Device);
        Ok(())
    }

    /// A number that is another one after every writing, on either side.
    pub(crate) fn written(&self) -> u64 {
        self.written
    }

    fn write(&mut self, fresh: Fresh) {
        self.fresh = fresh;
        self.written += 1;
    }

    /// The memory on the host, for the inventory of buffers.
    pub(crate) fn room_on_host(&self) -> &Vec<T> {
        &self.host
    }

    /// The memory on the GPU, for the inventory of buffers.
    pub(crate) fn room_on_device(&self) -> Option<&DeviceBuffer> {
        self.device.as_ref()
    }

    /// Address of the values as they were written last.
    pub(crate) fn address(&self) -> u64 {
        match (&self.device, self.fresh) {
            (Some(device), Fresh::Device) => device.ptr().0,
            _ => self.host.as_ptr() as u64,
        }
    }

    fn room(&mut self, gpu: &Gpu) -> Result<Ptr> {
        let bytes = (self.host.len() * size_of::<T>()).max(1);
        match &self.device {
            Some(device) if device.size_bytes() >= bytes => Ok(device.ptr()),
            _ => {
                self.fetch()?;
                self.device = None;
                // Room to grow, so that a longer batch does not come back at once.
                let device = gpu.alloc(bytes.next_power_of_two())?;
                let ptr = device.ptr();
                self.device = Some(device);
                if self.fresh == Fresh::Both {
                    self.fresh = Fresh::Host;
                }
                Ok(ptr)
            }
        }
    }
}
