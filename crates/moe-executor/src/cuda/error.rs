//! What can go wrong on a device.

use cudarc::driver::DriverError;

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
    /// The thread that starts transfers is gone.
    #[error(
        "the thread that starts Post-Fetch's transfers has died; the processor computed what it was given"
    )]
    Worker,
    /// The device cannot run the kernels.
    #[error(
        "the GPU has compute capability {}.{}; the kernels need 7.5 (Turing) or later: run on the CPU",
        .capability / 10, .capability % 10
    )]
    Capability {
        /// Ten times the compute capability.
        capability: u32,
    },
    /// The driver does not take the kernels.
    #[error(
        "the driver did not take the kernels `{module}`: {source}; it must be of CUDA 12.4 (550) or later"
    )]
    Load {
        /// Source file of the kernels.
        module: &'static str,
        /// The driver's word.
        source: DriverError,
    },
    /// A kernel could not be started.
    #[error("kernel `{kernel}` could not be started: {source}")]
    Launch {
        /// Name of the kernel.
        kernel: &'static str,
        /// The driver's word.
        source: DriverError,
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
    #[error("{what}: {source}")]
    Driver {
        /// What was tried.
        what: &'static str,
        /// The driver's word.
        source: DriverError,
    },
}

/// Result of a call to the device.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// A call of the driver that failed.
    pub(crate) fn driver(what: &'static str, source: DriverError) -> Error {
        Error::Driver { what, source }
    }
}
