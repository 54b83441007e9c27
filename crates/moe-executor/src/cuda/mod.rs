//! The GPU: kernels, memory, streams. The driver is loaded at run time; nothing of CUDA is needed to build or to run without one.
//!
//! ```text
//! kernels/*.cu ──(scripts/compile-kernels.py)──► ptx/*.ptx ──► module: functions by name ──► launch/*: one method a kernel
//! ```

mod clock;
mod device;
mod download;
mod error;
mod fetch;
mod gpu;
pub mod launch;
mod memory;
mod module;
pub mod post_fetch;
mod ptr;

pub use clock::Mark;
pub use device::{Device, Fallbacks, Policy, Scratch};
pub use download::Download;
pub use error::{Error, Result, Said};
pub use fetch::Wanted;
pub use gpu::{About, Gpu};
pub use launch::Kernels;
pub use memory::{DeviceBuffer, Pinned, Registered};
pub use ptr::Ptr;
