//! The GPU: kernels, memory, streams. The driver is loaded at run time; nothing of CUDA is needed to build or to run without one.
//!
//! ```text
//! kernels/*.cu ──(scripts/compile-kernels.py)──► ptx/*.ptx ──► module: functions by name ──► launch/*: one method a kernel
//! ```

mod error;
pub mod launch;
mod module;
mod ptr;

pub use error::{Error, Result};
pub use launch::Kernels;
pub use ptr::Ptr;
