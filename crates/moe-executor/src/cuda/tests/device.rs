//! The GPU of the tests, and buffers on it.

use std::sync::{Arc, OnceLock};

use cudarc::driver::result::memcpy_dtod_async;
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr, DeviceRepr, DriverError};
use moe_testkit::{Need, skip};

use crate::cuda::launch::Kernels;
use crate::cuda::{self, Gpu, Ptr};

/// The first GPU.
pub struct Device {
    pub stream: Arc<CudaStream>,
    pub kernels: Kernels,
}

impl Device {
    /// Returns the GPU, which all tests share. Skips the running test if there is no driver or no GPU.
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
        Gpu::detect().map_err(|missing| missing.to_string())?;
        let context = CudaContext::new(0).expect("the GPU can be opened");
        let stream = context.default_stream();
        let kernels = Kernels::load(&context).expect("the GPU supports the kernels");
        Ok(Device { stream, kernels })
    }

    /// A copy in GPU memory.
    pub fn upload<T: DeviceRepr>(&self, values: &[T]) -> Memory<T> {
        let memory = self.stream.clone_htod(values).expect("GPU memory");
        Memory(memory)
    }

    /// An output buffer of `n` NaN values with a guard after it.
    pub fn nan_output(&self, n: usize) -> Memory<f32> {
        self.output(&vec![f32::NAN; n])
    }

    /// An output buffer that contains `values`, with a guard after it.
    pub fn output(&self, values: &[f32]) -> Memory<f32> {
        let mut guarded = values.to_vec();
        guarded.extend([GUARD; GUARDS]);
        self.upload(&guarded)
    }

    /// A buffer of `n` zero bytes.
    pub fn zeros(&self, n: usize) -> Memory<u8> {
        Memory(self.stream.alloc_zeros(n).expect("GPU memory"))
    }

    /// Starts a copy of `from` to `to`, which have the same size, on the stream.
    pub fn copy(&self, from: &Memory<u8>, to: &Memory<u8>) {
        assert_eq!(from.0.len(), to.0.len());
        let (stream, n) = (self.stream.cu_stream(), from.0.len());
        // SAFETY: both buffers have `n` bytes of GPU memory, which no Rust reference points to.
        let done = unsafe { memcpy_dtod_async(self.at(to).0, self.at(from).0, n, stream) };
        done.expect("a D2D copy");
    }

    /// The contents of an output buffer after a launch, or the error of the launch.
    pub fn after(
        &self,
        launch: cuda::Result<()>,
        memory: &Memory<f32>,
    ) -> Result<Vec<f32>, String> {
        launch.map_err(|error| error.to_string())?;
        self.read(memory)
    }

    /// The contents of an output buffer; an error if a kernel has overwritten its guard.
    pub fn read(&self, memory: &Memory<f32>) -> Result<Vec<f32>, String> {
        let mut values = self.download(memory)?;
        let guard = values.split_off(values.len() - GUARDS);
        match guard.iter().position(|x| x.to_bits() != GUARD.to_bits()) {
            Some(at) => Err(format!("overwrote value {at} after the end")),
            None => Ok(values),
        }
    }

    /// The contents of a buffer.
    pub fn download<T: DeviceRepr>(&self, memory: &Memory<T>) -> Result<Vec<T>, String> {
        let message = |error: DriverError| error.to_string();
        self.stream.clone_dtoh(&memory.0).map_err(message)
    }

    /// The address of a buffer.
    pub fn at<T>(&self, memory: &Memory<T>) -> Ptr {
        Ptr(memory.0.device_ptr(&self.stream).0)
    }
}

const GUARD: f32 = 1234.5;
const GUARDS: usize = 64;

/// A buffer in GPU memory.
pub struct Memory<T>(CudaSlice<T>);

/// Pseudo-random values in -1..1.
pub fn noise(n: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12_345);
    let next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    std::iter::repeat_with(next).take(n).collect()
}

/// The values as f64.
pub fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().copied().map(f64::from).collect()
}
