//! A GPU and its memory.

use std::marker::PhantomData;
use std::ops::Range;

use zerocopy::{Immutable, IntoBytes};

use super::{Error, GpuInfo, GpuSpec, Never, Ptr, Result};

/// Has no values. The field is private so that the compiler does not warn of unreachable code in the rest of the crate.
pub struct Gpu(pub(super) Never);

impl Gpu {
    pub fn detect() -> Result<()> {
        Err(Error::NotBuilt)
    }

    pub fn open_all(_: &[GpuSpec]) -> Result<Vec<Gpu>> {
        Err(Error::NotBuilt)
    }

    pub fn index(&self) -> usize {
        match self.0 {}
    }

    pub fn info(&self) -> &GpuInfo {
        match self.0 {}
    }

    pub fn memory(&self) -> (u64, u64, u64) {
        match self.0 {}
    }

    pub fn bandwidth(&self, _: usize) -> Result<f64> {
        match self.0 {}
    }

    pub fn waits(&self) -> u64 {
        match self.0 {}
    }

    pub fn n_graphs(&self) -> u64 {
        match self.0 {}
    }

    pub(crate) fn alloc(&self, _: usize) -> Result<DeviceBuffer> {
        match self.0 {}
    }

    pub(crate) fn quantized_row(&self, _: usize, _: Option<DeviceBuffer>) -> Option<DeviceBuffer> {
        match self.0 {}
    }

    pub(crate) fn upload<T: IntoBytes + Immutable + ?Sized>(&self, _: Ptr, _: &T) -> Result<()> {
        match self.0 {}
    }

    pub(crate) fn receive(&self, _: &DeviceBuffer, _: &DeviceBuffer, _: usize) -> Result<()> {
        match self.0 {}
    }

    pub(crate) fn end_operation(&self) {
        match self.0 {}
    }

    pub(crate) fn follow(&self, _: &Gpu) -> Result<()> {
        match self.0 {}
    }

    pub(crate) fn register<'m>(&self, _: &'m [u8]) -> Result<Registered<'m>> {
        match self.0 {}
    }

    pub(crate) fn synchronize(&self) -> Result<()> {
        match self.0 {}
    }
}

/// Has no values.
pub struct Registered<'m> {
    _never: Never,
    _mapped: PhantomData<&'m [u8]>,
}

/// Has no values.
pub struct DeviceBuffer(Never);

impl DeviceBuffer {
    pub fn ptr(&self) -> Ptr {
        match self.0 {}
    }

    pub fn size_bytes(&self) -> usize {
        match self.0 {}
    }

    pub fn download(&self, _: &mut [u8]) -> Result<()> {
        match self.0 {}
    }

    pub fn grown(&self, _: usize, _: usize) -> Result<DeviceBuffer> {
        match self.0 {}
    }

    pub fn clear(&self, _: Range<usize>) -> Result<()> {
        match self.0 {}
    }
}

/// A copy that is never started.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Download;

impl Download {
    pub fn gpu(&self) -> usize {
        0
    }
}
