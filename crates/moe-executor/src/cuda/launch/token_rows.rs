//! Products of one token with quantized matrices. A block copies its rows to shared memory while the previous kernel runs.

use cudarc::driver::{CudaStream, LaunchConfig};

use super::products::MANY_ROWS;
use super::token::whole_rows;
use super::{Kernels, Rows, Weights, grid, of_type};
use crate::cuda::kernel::kernels;
use crate::cuda::module::args;
use crate::cuda::{Ptr, Result};

kernels! {
    ROWS_OF_ONE = "rows_of_one" => (
        w_0: Ptr, w_1: Ptr, w_2: Ptr, row_size: U32, bias_0: Ptr, bias_1: Ptr, bias_2: Ptr, x: Ptr, quantized: Ptr, n_in: U32,
        n_0: U32, n_1: U32, n_2: U32, segment: U32, staged: U32, out_0: Ptr, out_1: Ptr, out_2: Ptr,
    );
}

/// Rows per warp, as in token_rows.cuh.
const ROWS: usize = 2;
/// Smallest and largest number of warps per block. With small blocks, the activations are quantized too often.
const WARPS: [usize; 2] = [4, 20];
/// Limit of shared memory per block in bytes.
const SHARED: usize = 192 << 10;

/// Number of blocks of a grid for `n_out` rows.
pub(super) fn blocks(n_out: usize, grid: &LaunchConfig) -> u32 {
    let rows = (grid.block_dim.0 as usize / 32 * ROWS).max(1);
    u32::try_from(n_out.div_ceil(rows)).unwrap_or(u32::MAX)
}

impl Kernels {
    /// `out = weights · x + bias` for one row `x`. `bias`: `(n_out)` or null. Returns `false` if no kernel supports the type and the
    /// shape, or if the matrix has enough rows for other kernels to saturate the memory bandwidth.
    ///
    /// # Errors
    /// A driver error.
    pub(super) fn rows_of_one(
        &self,
        stream: &CudaStream,
        weights: &Weights,
        bias: Ptr,
        x: Rows,
        out: Ptr,
    ) -> Result<bool> {
        let Some(module) = of_type(&self.token, weights.ty) else {
            return Ok(false);
        };
        let (n_in, n_out) = (weights.n_in, weights.n_out);
        if n_out >= self.multiprocessors * MANY_ROWS {
            return Ok(false);
        }
        let [least, most] = WARPS;
        // One block for every two multiprocessors, or more blocks if they would be too large.
        let warps = n_out.div_ceil(self.multiprocessors);
        let limit = self.shared_up_to(SHARED);
        let mut fitting = (least..=warps.clamp(least, most)).rev();
        let layout = fitting
            .find_map(|warps| Some((warps, whole_rows(weights, (warps, ROWS), n_in, limit)?)));
        let Some((warps, layout)) = layout else {
            return Ok(false);
        };
        let args = args![
            weights.ptr,
            Ptr::NULL,
            Ptr::NULL,
            weights.row_size,
            bias,
            Ptr::NULL,
            Ptr::NULL,
            x.x,
            x.quantized,
            n_in,
            n_out,
            0u32,
            0u32,
            layout.segment,
            layout.staged,
            out,
            Ptr::NULL,
            Ptr::NULL,
        ];
        let mut grid = grid(n_out.div_ceil(warps * ROWS), warps * 32);
        grid.shared_mem_bytes = layout.shared as u32;
        module.launch(stream, ROWS_OF_ONE, grid, &args)?;
        Ok(true)
    }
}
