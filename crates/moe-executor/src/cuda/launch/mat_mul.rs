//! Products with several rows of activations per matrix.
//!
//! A matrix-vector kernel multiplies few rows per matrix. Other products are computed in tiles: rows of weights times rows of
//! activations.

use cudarc::driver::{CudaStream, LaunchConfig};

use super::product_tiles::Choice;
use super::products::{THREADS, WARPS, Weights, count};
use super::{Kernels, grid};
use crate::cuda::kernel::kernels;
use crate::cuda::module::args;
use crate::cuda::{Ptr, Result};

kernels! {
    MAT_VEC_FEW = "mat_vec_few", MAT_MUL = "mat_mul" => (
        weights: Ptr, expert_size: U64, row_size: U32, bias: Ptr, x: Ptr, converted: Ptr, n_source: U32, list: Ptr,
        bounds: Ptr, wide: Bool, k: U32, rows_per: U32, n_rows: U32, n_in: U32, n_out: U32, glu: U32, out: Ptr,
    );
}

/// Activation rows for which a warp decodes a row of weights once, as in the kernel.
const ROWS_AT_A_TIME: usize = 4;

/// Operands of a product with several rows of activations per matrix.
pub(super) struct Many<'a> {
    pub weights: &'a Weights,
    pub bias: Ptr,
    pub x: Ptr,
    /// Number of rows of `x`.
    pub rows: usize,
    /// [`Kernels::converted_size`] bytes. If the weights are quantized, the quantized rows of `x`.
    pub scratch: Ptr,
    pub grouped: Grouped,
    pub glu: u32,
    pub out: Ptr,
}

/// The entries of each matrix.
pub(super) struct Grouped {
    /// Entries sorted by expert. If null, the entries are the rows of a plain product.
    pub list: Ptr,
    pub bounds: Ptr,
    pub wide: bool,
    pub k: usize,
    pub rows_per: usize,
    pub entries: usize,
    pub n_expert: usize,
}

impl Grouped {
    /// Mean number of entries of a matrix, rounded up.
    pub fn per_expert(&self) -> usize {
        self.entries.div_ceil(self.n_expert.max(1))
    }

    /// Number of tiles of `rows` x `tokens`, if all matrices of `n_out` rows have the mean number of entries.
    pub fn tiles(&self, n_out: usize, rows: usize, tokens: usize) -> usize {
        n_out.div_ceil(rows) * self.n_expert * self.per_expert().div_ceil(tokens)
    }
}

impl Kernels {
    /// Products of several rows per matrix.
    pub(super) fn mat_mul(&self, stream: &CudaStream, many: &Many) -> Result<()> {
        let (weights, grouped) = (many.weights, &many.grouped);
        if grouped.entries == 0 {
            return Ok(());
        }
        let n_out = weights.n_out;
        let module = self.products(weights.ty)?;
        let per_expert = grouped.per_expert();
        let choice = Choice::new(weights, grouped, module.capability(), self.multiprocessors);
        let (kernel, x, z, threads, shared) = if per_expert <= choice.few {
            let x = n_out.div_ceil(2).div_ceil(WARPS);
            let z = per_expert.div_ceil(ROWS_AT_A_TIME);
            (MAT_VEC_FEW, x, z, THREADS, 0)
        } else {
            let tile = choice.tile;
            if let Some(convert) = choice.convert {
                let n = many.rows * weights.n_in;
                let blocks = grid((n / 8).div_ceil(THREADS), THREADS);
                let args = args![many.x, n, many.scratch];
                self.experts.launch(stream, convert, blocks, &args)?;
            }
            // Up to four times the average, because experts differ in their number of entries. Blocks without a tile end at once.
            let tiles = 4 * per_expert.div_ceil(tile.tokens);
            let most = grouped.entries.div_ceil(tile.tokens);
            let z = tiles.min(most).min(0xffff);
            (
                tile.kernel,
                n_out.div_ceil(tile.rows),
                z,
                tile.threads,
                tile.shared,
            )
        };
        let blocks = LaunchConfig {
            grid_dim: (count(x), count(grouped.n_expert), count(z)),
            block_dim: (count(threads), 1, 1),
            shared_mem_bytes: count(shared),
        };
        let args = args![
            weights.ptr,
            weights.expert_size,
            weights.row_size,
            many.bias,
            many.x,
            many.scratch,
            many.rows,
            grouped.list,
            grouped.bounds,
            grouped.wide,
            grouped.k,
            grouped.rows_per,
            grouped.entries,
            weights.n_in,
            n_out,
            many.glu,
            many.out,
        ];
        module.launch_after(stream, kernel, blocks, &args)
    }
}
