//! Errors of GPUs.

use std::ffi::CStr;
use std::fmt::{self, Display, Formatter};
use std::io;

use cudarc::driver::DriverError;
use cudarc::driver::sys::CUresult;

/// An error of a GPU: what was attempted, and what the driver reported.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// This machine has no CUDA driver.
    #[error("no CUDA driver was found (libcuda.so.1, nvcuda.dll): install the NVIDIA driver")]
    NoDriver,
    /// The driver finds no GPU.
    #[error(
        "the CUDA driver finds no GPU: check nvidia-smi and the environment variable CUDA_VISIBLE_DEVICES"
    )]
    NoDevice,
    /// A GPU of the list does not exist.
    #[error(
        "there is no GPU {ordinal}: the CUDA driver finds {count}, counted from 0; check nvidia-smi and the environment variable CUDA_VISIBLE_DEVICES"
    )]
    NoSuchGpu {
        /// Requested number.
        ordinal: usize,
        /// Number of GPUs that the driver finds.
        count: usize,
    },
    /// An allocation exceeds the memory limit.
    #[error("cannot allocate {wanted} bytes of GPU memory: {used} of {limit} bytes are in use")]
    OutOfMemory {
        /// Requested size in bytes.
        wanted: u64,
        /// Bytes in use.
        used: u64,
        /// Memory limit in bytes.
        limit: u64,
    },
    /// Event times or copied values of a pass were requested before it ended.
    #[error("event times and copied values are not available before the pass has ended")]
    PassNotEnded,
    /// A test injected it.
    #[error("{what} failed: a test injected the error")]
    Injected {
        /// The operation that fails.
        what: &'static str,
    },
    /// The driver is too old for the kernels.
    #[error(
        "the driver supports CUDA {}.{}; the kernels need 12.4 (driver 550) or later: update the driver",
        .version / 1000, .version % 1000 / 10
    )]
    OldDriver {
        /// As the driver reports it, such as 11080 for 11.8.
        version: i32,
    },
    /// The GPU is too old for the kernels.
    #[error(
        "the GPU has compute capability {}.{}; the kernels need 7.5 (Turing) or later",
        .capability / 10, .capability % 10
    )]
    Capability {
        /// Ten times the compute capability, such as 70 for 7.0.
        capability: u32,
    },
    /// Embedded kernels are damaged.
    #[error(
        "the embedded kernels `{module}` cannot be decompressed: {source}; reinstall the program"
    )]
    Decompress {
        /// Source file of the kernels.
        module: &'static str,
        /// Error of the decompressor.
        source: io::Error,
    },
    /// The driver rejects embedded kernels.
    #[error("the driver rejects the kernels `{module}`: {status}")]
    Load {
        /// Source file of the kernels.
        module: &'static str,
        /// Error of the driver.
        status: DriverStatus,
    },
    /// A kernel could not be launched.
    #[error("kernel `{kernel}` could not be launched: {status}")]
    Launch {
        /// Name of the kernel.
        kernel: &'static str,
        /// Error of the driver.
        status: DriverStatus,
    },
    /// No kernel supports an operation.
    #[error("kernel `{kernel}`: {what} is not supported")]
    Unsupported {
        /// Name of the kernel.
        kernel: &'static str,
        /// The unsupported type, shape or size.
        what: String,
    },
    /// Another driver call failed.
    #[error("{what} failed: {status}")]
    Driver {
        /// The operation that was attempted.
        what: &'static str,
        /// Error of the driver.
        status: DriverStatus,
    },
}

/// Result of an operation on a GPU.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Whether the message ends with what to do.
    pub fn contains_advice(&self) -> bool {
        matches!(
            self,
            Error::NoDriver
                | Error::NoDevice
                | Error::NoSuchGpu { .. }
                | Error::OldDriver { .. }
                | Error::Decompress { .. }
        )
    }

    /// Whether GPU memory was insufficient.
    pub fn is_out_of_memory(&self) -> bool {
        match self {
            Error::OutOfMemory { .. } => true,
            Error::Load { status, .. }
            | Error::Launch { status, .. }
            | Error::Driver { status, .. } => status.0.0 == CUresult::CUDA_ERROR_OUT_OF_MEMORY,
            _ => false,
        }
    }

    /// The error of a failed driver call.
    pub(crate) fn driver(what: &'static str, error: DriverError) -> Error {
        let status = DriverStatus(error);
        Error::Driver { what, status }
    }
}

/// An error of the driver. It is displayed as its name, its description, and what to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DriverStatus(pub DriverError);

impl DriverStatus {
    fn advice(self) -> &'static str {
        use CUresult::*;
        match self.0.0 {
            CUDA_ERROR_DEVICE_UNAVAILABLE => {
                "another process uses the GPU exclusively; find it with nvidia-smi and wait until it ends"
            }
            CUDA_ERROR_OUT_OF_MEMORY => {
                "stop other processes that use GPU memory (nvidia-smi), or keep more of the model on the CPU"
            }
            CUDA_ERROR_NO_DEVICE | CUDA_ERROR_INVALID_DEVICE => {
                "check nvidia-smi and the environment variable CUDA_VISIBLE_DEVICES"
            }
            CUDA_ERROR_SYSTEM_DRIVER_MISMATCH | CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE => {
                "the versions of the driver library and the kernel module differ: restart the machine, or reinstall the driver"
            }
            CUDA_ERROR_NO_BINARY_FOR_GPU
            | CUDA_ERROR_INVALID_PTX
            | CUDA_ERROR_UNSUPPORTED_PTX_VERSION
            | CUDA_ERROR_JIT_COMPILER_NOT_FOUND => "update the driver to 550 or later",
            _ => "see nvidia-smi and the system log for details",
        }
    }
}

impl Display for DriverStatus {
    fn fmt(&self, f: &mut Formatter) -> fmt::Result {
        let DriverStatus(error) = self;
        match error.error_name().map(CStr::to_string_lossy) {
            Ok(name) => f.write_str(&name)?,
            Err(_) => write!(f, "error {}", error.0 as u32)?,
        }
        if let Ok(description) = error.error_string().map(CStr::to_string_lossy) {
            write!(f, ", {description}")?;
        }
        write!(f, "; {}", self.advice())
    }
}
