//! The GPU: kernels, memory, streams. The driver is loaded at run time; nothing of CUDA is needed to build or to run without one.
//!
//! ```text
//! kernels/*.cu ──(scripts/compile-kernels.py)──► ptx/*.ptx ──► module: functions by name ──► launch/*: one method a kernel
//! ```

pub mod launch;
mod ptr;

pub use ptr::Ptr;
