//! The GPU of a test, if there is one.

use std::sync::{Arc, OnceLock};

use cudarc::driver::result::memcpy_dtod_async;
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr, DeviceRepr, DriverError};
use moe_testkit::{Need, skip};

use crate::cuda::launch::Kernels;
use crate::cuda::{self, Gpu, Ptr};

/// The first device.
pub struct Device {
    pub stream: Arc<CudaStream>,
    pub kernels: Kernels,
}

impl Device {
    /// One for all tests; skips the running test where there is no driver or no device.
    #[track_caller]
    pub fn open() -> Option<&'static Device> {
        static DEVICE: OnceLock<Result<Device, String>> = OnceLock::new();
        match DEVICE.get_or_init(Device::new) {
            Ok(device) => Some(device),
            Err(missing) => {
                skip(Need::Gpu, missing);
                None
            }
        }
    }

    fn new() -> Result<Device, String> {
        Gpu::look().map_err(|missing| missing.to_string())?;
        let context = CudaContext::new(0).expect("the device opens");
        let stream = context.default_stream();
        let kernels = Kernels::load(&context).expect("the kernels fit the device");
        Ok(Device { stream, kernels })
    }

    /// A copy in device memory.
    pub fn upload<T: DeviceRepr>(&self, values: &[T]) -> Memory<T> {
        let memory = self.stream.clone_htod(values).expect("device memory");
        Memory(memory)
    }

    /// Room for `n` values, all NaN, with a guard behind them.
    pub fn room(&self, n: usize) -> Memory<f32> {
        self.output(&vec![f32::NAN; n])
    }

    /// A copy to be written to, with a guard behind it.
    pub fn output(&self, values: &[f32]) -> Memory<f32> {
        let mut guarded = values.to_vec();
        guarded.extend([GUARD; GUARDS]);
        self.upload(&guarded)
    }

    /// `n` bytes of zeros.
    pub fn zeros(&self, n: usize) -> Memory<u8> {
        Memory(self.stream.alloc_zeros(n).expect("device memory"))
    }

    /// Copies the bytes of `from` over those of `to`, as many, on the stream.
    pub fn copy(&self, from: &Memory<u8>, to: &Memory<u8>) {
        assert_eq!(from.0.len(), to.0.len());
        let (stream, n) = (self.stream.cu_stream(), from.0.len());
        // SAFETY: both have `n` bytes, and no slice of the host shows to them.
        let done = unsafe { memcpy_dtod_async(self.at(to).0, self.at(from).0, n, stream) };
        done.expect("a copy on the device");
    }

    /// What a launch wrote to an [`Device::output`] or [`Device::room`], or why it did not.
    pub fn after(
        &self,
        launch: cuda::Result<()>,
        memory: &Memory<f32>,
    ) -> Result<Vec<f32>, String> {
        launch.map_err(|error| error.to_string())?;
        self.read(memory)
    }

    /// The values of an [`Device::output`] or [`Device::room`]; an error if the guard was written to.
    pub fn read(&self, memory: &Memory<f32>) -> Result<Vec<f32>, String> {
        let mut values = self.download(memory)?;
        let guard = values.split_off(values.len() - GUARDS);
        match guard.iter().position(|x| x.to_bits() != GUARD.to_bits()) {
            Some(at) => Err(format!("wrote {} behind the end", at + 1)),
            None => Ok(values),
        }
    }

    /// The values of memory.
    pub fn download<T: DeviceRepr>(&self, memory: &Memory<T>) -> Result<Vec<T>, String> {
        let message = |error: DriverError| error.to_string();
        self.stream.clone_dtoh(&memory.0).map_err(message)
    }

    /// Its address.
    pub fn at<T>(&self, memory: &Memory<T>) -> Ptr {
        Ptr(memory.0.device_ptr(&self.stream).0)
    }
}

const GUARD: f32 = 1234.5;
const GUARDS: usize = 64;

/// Device memory of a test.
pub struct Memory<T>(CudaSlice<T>);

/// Values in -1..1, the same for the same seed.
pub fn noise(n: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12_345);
    let next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    std::iter::repeat_with(next).take(n).collect()
}

/// As f64.
pub fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().copied().map(f64::from).collect()
}
