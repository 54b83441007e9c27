//! The GPU of a test, if there is one, and a report of all its cases.
#![allow(dead_code)] // Not every test uses all of it.

use std::sync::{Arc, OnceLock};

use cudarc::driver::result::memcpy_dtod_async;
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr, DeviceRepr, DriverError};
use moe_executor::cuda::{self, Kernels, Ptr};

/// The first device.
pub struct Device {
    pub stream: Arc<CudaStream>,
    pub kernels: Kernels,
}

impl Device {
    /// One for all tests of a binary; none, with a line that says why, where there is no driver or no device.
    pub fn open() -> Option<&'static Device> {
        static DEVICE: OnceLock<Option<Device>> = OnceLock::new();
        DEVICE.get_or_init(Device::new).as_ref()
    }

    fn new() -> Option<Device> {
        // SAFETY: it only looks for the library.
        if !unsafe { cudarc::driver::sys::is_culib_present() } {
            println!("no CUDA driver: nothing is tested");
            return None;
        }
        let context = match CudaContext::new(0) {
            Ok(context) => context,
            Err(error) => {
                println!("no CUDA device: nothing is tested ({error})");
                return None;
            }
        };
        println!("testing on {}", context.name().unwrap_or_default());
        let stream = context.default_stream();
        let kernels = Kernels::load(&context).expect("the kernels fit the device");
        Some(Device { stream, kernels })
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
        let told = |error: DriverError| error.to_string();
        self.stream.clone_dtoh(&memory.0).map_err(told)
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

/// What came of the cases of a test: a line for each, and all failures at the end.
#[derive(Default)]
pub struct Report {
    failures: Vec<String>,
}

impl Report {
    /// Compares values: each may be off by `tolerance · (1 + |wanted|)`; what is no number must be none in both.
    pub fn compare(
        &mut self,
        case: &str,
        got: Result<Vec<f32>, String>,
        want: &[f64],
        tolerance: f64,
    ) {
        let got = match got {
            Ok(got) => got,
            Err(error) => return self.fail(format!("{case}: {error}")),
        };
        if got.len() != want.len() {
            return self.fail(format!("{case}: {} values, not {}", got.len(), want.len()));
        }
        let error = |(got, want): (&f32, &f64)| match (f64::from(*got), *want) {
            (got, want) if got.is_nan() && want.is_nan() || got == want => 0.0,
            (got, want) => ((got - want) / (1.0 + want.abs())).abs(),
        };
        // A NaN on one side only is the worst error.
        let errors = got.iter().zip(want).map(error);
        let errors: Vec<f64> = errors
            .map(|e| if e.is_nan() { f64::INFINITY } else { e })
            .collect();
        let worst = errors.iter().copied().fold(0.0, f64::max);
        let wrong = errors.iter().filter(|e| **e > tolerance).count();
        match errors.iter().position(|e| *e > tolerance) {
            None => println!("{case}: {} values, worst error {worst:.2e}", got.len()),
            Some(at) => self.fail(format!(
                "{case}: {wrong} of {} values wrong, worst error {worst:.2e} (tolerance {tolerance:.0e}), the first at {at}: \
                 {}, not {}",
                got.len(),
                got[at],
                want[at]
            )),
        }
    }

    /// A failure of a case.
    pub fn fail(&mut self, failure: String) {
        println!("FAILED {failure}");
        self.failures.push(failure);
    }

    /// Failures so far.
    pub fn n_failures(&self) -> usize {
        self.failures.len()
    }

    /// Fails the test if a case failed.
    pub fn finish(self) {
        let failures = self.failures;
        let list = failures.join("\n  ");
        assert!(failures.is_empty(), "{} cases:\n  {list}", failures.len());
    }
}

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
