//! What can go wrong on a device.

use std::ffi::CStr;
use std::fmt::{self, Display, Formatter};

use cudarc::driver::DriverError;
use cudarc::driver::sys::CUresult;

/// Errors of the GPU. Each names what was tried and what the driver said.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No driver on this machine.
    #[error(
        "no CUDA driver was found (libcuda.so.1, nvcuda.dll): install NVIDIA's driver, or run with --device cpu"
    )]
    NoDriver,
    /// No GPU on this machine.
    #[error("the CUDA driver sees no GPU (CUDA_VISIBLE_DEVICES?); run with --device cpu")]
    NoDevice,
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
    /// A test asked for it.
    #[error("{what} was made to fail")]
    Injected {
        /// What failed.
        what: &'static str,
    },
    /// The driver is older than the kernels.
    #[error(
        "the driver is of CUDA {}.{}; the kernels need 12.4 (driver 550) or later: update it, or run with --device cpu",
        .version / 1000, .version % 1000 / 10
    )]
    OldDriver {
        /// As the driver tells it, such as 12040.
        version: i32,
    },
    /// The device cannot run the kernels.
    #[error(
        "the GPU has compute capability {}.{}; the kernels need 7.5 (Turing) or later: run with --device cpu",
        .capability / 10, .capability % 10
    )]
    Capability {
        /// Ten times the compute capability.
        capability: u32,
    },
    /// The driver does not take the kernels.
    #[error("the driver did not take the kernels `{module}`: {said}")]
    Load {
        /// Source file of the kernels.
        module: &'static str,
        /// The driver's word.
        said: Said,
    },
    /// A kernel could not be started.
    #[error("kernel `{kernel}` could not be started: {said}")]
    Launch {
        /// Name of the kernel.
        kernel: &'static str,
        /// The driver's word.
        said: Said,
    },
    /// Something that no kernel is there for.
    #[error("kernel `{kernel}`: {what} is not supported")]
    Unsupported {
        /// Name of the kernel.
        kernel: &'static str,
        /// What was asked for.
        what: String,
    },
    /// Another call of the driver failed.
    #[error("{what}: {said}")]
    Driver {
        /// What was tried.
        what: &'static str,
        /// The driver's word.
        said: Said,
    },
}

/// Result of a call to the device.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// A call of the driver that failed.
    pub(crate) fn driver(what: &'static str, error: DriverError) -> Error {
        let said = Said(error);
        Error::Driver { what, said }
    }
}

/// What the driver said; displayed as its name of the error, its words, and what to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Said(pub DriverError);

impl Said {
    fn what_to_do(self) -> &'static str {
        use CUresult::*;
        match self.0.0 {
            CUDA_ERROR_DEVICE_UNAVAILABLE => {
                "another process holds the GPU (nvidia-smi); wait for it, or run with --device cpu"
            }
            CUDA_ERROR_OUT_OF_MEMORY => {
                "leave more with the processor (--n-gpu-layers, --cpu-moe), or end what else uses the memory (nvidia-smi)"
            }
            CUDA_ERROR_NO_DEVICE | CUDA_ERROR_INVALID_DEVICE => {
                "look at CUDA_VISIBLE_DEVICES and nvidia-smi, or run with --device cpu"
            }
            CUDA_ERROR_SYSTEM_DRIVER_MISMATCH | CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE => {
                "the driver's library and kernel module differ: restart the machine, or install the driver anew"
            }
            CUDA_ERROR_NO_BINARY_FOR_GPU
            | CUDA_ERROR_INVALID_PTX
            | CUDA_ERROR_UNSUPPORTED_PTX_VERSION
            | CUDA_ERROR_JIT_COMPILER_NOT_FOUND => "update the driver, to 550 or later",
            _ => "nvidia-smi and the system's log may tell more; --device cpu does without the GPU",
        }
    }
}

impl Display for Said {
    fn fmt(&self, f: &mut Formatter) -> fmt::Result {
        let Said(error) = self;
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
