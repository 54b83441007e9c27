//! Norms, sums, activations, rotations: row by row.

use cudarc::driver::CudaStream;

use super::{Kernels, grid};
use crate::cuda::module::args;
use crate::cuda::{Ptr, Result};

/// Threads of a block in kernels that take an element a thread.
const THREADS: usize = 256;

impl Kernels {
    /// `out = a + b`, `n` elements each. `out` may be `a` or `b`.
    pub fn add(&self, stream: &CudaStream, a: Ptr, b: Ptr, n: usize, out: Ptr) -> Result<()> {
        let grid = grid(n.div_ceil(THREADS), THREADS);
        self.rows.launch(stream, "add", grid, &args![a, b, n, out])
    }
}
