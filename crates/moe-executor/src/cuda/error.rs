//! What can go wrong on a device.

use std::ffi::CStr;
use std::fmt::{self, Display, Formatter};
use std::io;

use cudarc::driver::DriverError;
use cudarc::driver::sys::CUresult;

/// Errors of the GPU. Each names what was tried and what the driver reported.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No driver on this machine.
    #[error("no CUDA driver was found (libcuda.so.1, nvcuda.dll): install NVIDIA's driver")]
    NoDriver,
    /// No GPU on this machine.
    #[error("the CUDA driver finds no GPU: check nvidia-smi and the variable CUDA_VISIBLE_DEVICES")]
    NoDevice,
    /// No GPU of that number.
    #[error(
        "there is no GPU {ordinal}: the CUDA driver finds {count}, counted from 0; check nvidia-smi and the variable CUDA_VISIBLE_DEVICES"
    )]
    NoSuchGpu {
        /// Number asked for.
        ordinal: usize,
        /// GPUs of the machine.
        count: usize,
    },
    /// There is no room in the GPU's memory, or not under the limit that was set.
    #[error("{wanted} bytes of GPU memory do not fit: {used} of {limit} are in use")]
    OutOfMemory {
        /// Bytes asked for.
        wanted: u64,
        /// Bytes in use.
        used: u64,
        /// Bytes that may be used.
        limit: u64,
    },
    /// Times or copies of a pass were asked for before it ended.
    #[error("times and copies of a pass are known when it has ended")]
    PassNotEnded,
    /// A test asked for it.
    #[error("{what} was made to fail")]
    Injected {
        /// What failed.
        what: &'static str,
    },
    /// The driver is older than the kernels.
    #[error(
        "the driver is of CUDA {}.{}; the kernels need 12.4 (driver 550) or later: update it",
        .version / 1000, .version % 1000 / 10
    )]
    OldDriver {
        /// As the driver reports it, such as 12040.
        version: i32,
    },
    /// The device cannot run the kernels.
    #[error(
        "the GPU has compute capability {}.{}; the kernels need 7.5 (Turing) or later",
        .capability / 10, .capability % 10
    )]
    Capability {
        /// Ten times the compute capability.
        capability: u32,
    },
    /// The embedded kernels are damaged.
    #[error(
        "the kernels `{module}` in the program cannot be decompressed: {source}; install the program again"
    )]
    Decompress {
        /// Source file of the kernels.
        module: &'static str,
        /// What the decompressor reported.
        source: io::Error,
    },
    /// The driver rejects the kernels.
    #[error("the driver rejects the kernels `{module}`: {status}")]
    Load {
        /// Source file of the kernels.
        module: &'static str,
        /// What the driver reported.
        status: DriverStatus,
    },
    /// A kernel could not be started.
    #[error("kernel `{kernel}` could not be started: {status}")]
    Launch {
        /// Name of the kernel.
        kernel: &'static str,
        /// What the driver reported.
        status: DriverStatus,
    },
    /// An operation that no kernel supports.
    #[error("kernel `{kernel}`: {what} is not supported")]
    Unsupported {
        /// Name of the kernel.
        kernel: &'static str,
        /// What was asked for.
        what: String,
    },
    /// Another call of the driver failed.
    #[error("{what}: {status}")]
    Driver {
        /// What was tried.
        what: &'static str,
        /// What the driver reported.
        status: DriverStatus,
    },
}

/// Result of a call to the device.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Whether there was not enough GPU memory.
    pub fn is_out_of_memory(&self) -> bool {
        match self {
            Error::OutOfMemory { .. } => true,
            Error::Load { status, .. }
            | Error::Launch { status, .. }
            | Error::Driver { status, .. } => status.0.0 == CUresult::CUDA_ERROR_OUT_OF_MEMORY,
            _ => false,
        }
    }

    /// A call of the driver that failed.
    pub(crate) fn driver(what: &'static str, error: DriverError) -> Error {
        let status = DriverStatus(error);
        Error::Driver { what, status }
    }
}

/// An error of the driver, displayed as its name, its description, and what to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DriverStatus(pub DriverError);

impl DriverStatus {
    fn what_to_do(self) -> &'static str {
        use CUresult::*;
        match self.0.0 {
            CUDA_ERROR_DEVICE_UNAVAILABLE => {
                "another process holds the GPU (nvidia-smi); wait until it ends"
            }
            CUDA_ERROR_OUT_OF_MEMORY => {
                "end what else uses the GPU's memory (nvidia-smi), or leave more of the model on the CPU"
            }
            CUDA_ERROR_NO_DEVICE | CUDA_ERROR_INVALID_DEVICE => {
                "check nvidia-smi and the variable CUDA_VISIBLE_DEVICES"
            }
            CUDA_ERROR_SYSTEM_DRIVER_MISMATCH | CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE => {
                "the driver's library and its kernel module differ: restart the machine, or install the driver again"
            }
            CUDA_ERROR_NO_BINARY_FOR_GPU
            | CUDA_ERROR_INVALID_PTX
            | CUDA_ERROR_UNSUPPORTED_PTX_VERSION
            | CUDA_ERROR_JIT_COMPILER_NOT_FOUND => "update the driver to 550 or later",
            _ => "nvidia-smi and the system log may report more",
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
        if let Ok(words) = error.error_string().map(CStr::to_string_lossy) {
            write!(f, ", {words}")?;
        }
        write!(f, "; {}", self.what_to_do())
    }
}
