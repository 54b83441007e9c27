//! One method for each kernel: what it reads, what it writes, how its grid is cut.
//!
//! Activations are f32, row after row, contiguous. Nothing waits: a method starts kernels on the stream that it is given. The
//! caller promises that the pointers show to device memory of the told shapes.

mod rows;
mod wanted;

use std::sync::Arc;

use cudarc::driver::{CudaContext, LaunchConfig};

pub use wanted::*;

use super::Result;
use super::module::{self, Module};

/// All kernels on one device, translated for it when first used.
pub struct Kernels {
    rows: Module,
}

impl Kernels {
    /// The kernels for the device of `context`.
    ///
    /// # Errors
    /// The device is too old.
    pub fn load(context: &Arc<CudaContext>) -> Result<Kernels> {
        Ok(Kernels {
            rows: Module::new(context, &module::ROWS)?,
        })
    }
}

/// A grid of `blocks` of `threads` each, without dynamic shared memory.
fn grid(blocks: usize, threads: usize) -> LaunchConfig {
    // More blocks than a grid takes are refused by the driver, not cut.
    let blocks = u32::try_from(blocks).unwrap_or(u32::MAX);
    LaunchConfig {
        grid_dim: (blocks, 1, 1),
        block_dim: (threads as u32, 1, 1),
        shared_mem_bytes: 0,
    }
}
