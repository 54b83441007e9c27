//! The GPU: kernels, memory, streams. The driver is loaded at run time; nothing of CUDA is needed to build or to run without one.
//!
//! Whoever launches a kernel or starts a copy vouches for its addresses and lengths. So nothing that does is public: other crates open a
//! [`Gpu`], make a [`Device`] of it and hand that to a session.
//!
//! ```text
//! kernels/*.cu ──(scripts/compile-kernels.py)──► ptx/*.ptx ──► module: functions by name ──► launch/*: one method a kernel
//!                                                                                            ▲
//!                                              crate::ops ──► ops/*: operands to the GPU ────┘
//! ```

mod clock;
mod device;
mod download;
mod error;
mod fetch;
mod gpu;
pub(crate) mod launch;
mod memory;
mod module;
mod ops;
pub mod post_fetch;
mod ptr;
mod timeline;

#[cfg(test)]
mod tests;

pub(crate) use device::Scratch;
pub use device::{Device, Fallbacks, Policy};
pub(crate) use download::Download;
pub use error::{DriverStatus, Error, Result};
pub(crate) use fetch::Wanted;
pub use gpu::{About, Gpu};
pub(crate) use memory::{DeviceBuffer, Pinned, Registered};
pub(crate) use ptr::Ptr;
pub(crate) use timeline::Event;
