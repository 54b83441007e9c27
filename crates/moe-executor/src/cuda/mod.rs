//! NVIDIA GPUs: kernels, memory, streams. The driver is loaded at run time. Building needs no CUDA toolkit, and running on the
//! CPU needs no driver.
//!
//! Code that launches a kernel or starts a copy must ensure that addresses and lengths are valid. So none of it is public: other
//! crates open a [`Gpu`] and pass it to [`Devices`](crate::Devices).
//!
//! Without the feature `cuda`, `absent.rs` replaces this file. It has the same items for the rest of the crate, and a [`Gpu`]
//! that cannot be created.
//!
//! ```text
//! kernels/*.cu ──(scripts/compile-kernels.py)──► ptx/*.ptx.zst ──► module: functions by name ──► launch/*: one method per kernel
//!                                                                                                ▲
//!                                                  crate::ops ──► ops/*: operands to the GPU ────┘
//! ```

mod clock;
mod device;
mod download;
mod error;
mod fallbacks;
mod gpu;
mod gpu_info;
mod graph;
mod handles;
mod kernel;
mod launch;
mod launches;
mod memory;
mod module;
mod ops;
mod pass_log;
mod policy;
pub mod post_fetch;
mod queue;
mod staging;
mod starts;
mod timeline;

#[cfg(test)]
mod tests;

pub use device::Device;
pub(crate) use device::{Found, Scratch};
pub(crate) use download::Download;
pub use error::{DriverStatus, Error, Result};
pub use fallbacks::Fallbacks;
pub use gpu::Gpu;
pub use gpu_info::{GpuInfo, GpuSpec};
pub(crate) use handles::{Event, Ptr, Wanted};
pub(crate) use memory::{DeviceBuffer, Pinned, Registered};
pub(crate) use ops::{Entries, HotCall, HotInput};
pub use policy::Policy;
