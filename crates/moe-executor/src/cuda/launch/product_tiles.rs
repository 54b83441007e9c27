//! The kernels that multiply in tiles, and the selection among them.

use moe_gguf::GgmlType;

use super::experts::{CONVERT_BF16, CONVERT_F16};
use super::mat_mul::{Grouped, MAT_MUL};
use super::products::{THREADS, Weights};
use crate::cuda::kernel::{Kernel, kernels};

kernels! {
    MAT_MUL_64_16 = "mat_mul_64_16", MAT_MUL_64_64 = "mat_mul_64_64", MAT_MUL_128_64 = "mat_mul_128_64" => (
        weights: Ptr, expert_size: U64, row_size: U32, bias: Ptr, x: Ptr, converted: Ptr, n_source: U32, list: Ptr,
        bounds: Ptr, wide: Bool, k: U32, rows_per: U32, n_rows: U32, n_in: U32, n_out: U32, glu: U32, out: Ptr,
    );
}

/// Ten times the compute capability from which on the modules for F16 and BF16 have kernels on tensor cores.
const CAPABILITY: u32 = 80;
/// Rows of weights that these kernels read have a multiple of this many elements: 16 bytes.
const ELEMENTS: usize = 8;

/// A kernel that computes a tile per block.
pub(super) struct Tile {
    pub kernel: Kernel,
    /// Rows of weights per tile.
    pub rows: usize,
    /// Rows of activations per tile.
    pub tokens: usize,
    pub threads: usize,
    /// Dynamic shared memory in bytes.
    pub shared: usize,
    /// The kernel that converts the activations before. They are otherwise quantized already, or read in f32.
    pub convert: Option<Kernel>,
    /// Largest mean number of activation rows per matrix for which the matrix-vector kernel is faster.
    pub few: usize,
}

impl Tile {
    /// The tile for a product.
    pub fn choose(
        weights: &Weights,
        grouped: &Grouped,
        capability: u32,
        multiprocessors: usize,
    ) -> Tile {
        let convert = match weights.ty {
            GgmlType::F16 => CONVERT_F16,
            GgmlType::BF16 => CONVERT_BF16,
            _ => return Tile::on_any_gpu(weights, grouped, multiprocessors),
        };
        if capability < CAPABILITY || !weights.n_in.is_multiple_of(ELEMENTS) {
            return Tile::on_any_gpu(weights, grouped, multiprocessors);
        }
        let tiles = |rows, tokens| grouped.tiles(weights.n_out, rows, tokens);
        // Large tiles need fewer reads of shared memory, small ones occupy more multiprocessors. The limits are measurements on an
        // H200.
        let (kernel, rows, tokens, stages) = if tiles(64, 16) <= 2 * multiprocessors {
            (MAT_MUL_64_16, 64, 16, 6)
        } else if 2 * tiles(128, 64) < 3 * multiprocessors {
            (MAT_MUL_64_64, 64, 64, 4)
        } else {
            (MAT_MUL_128_64, 128, 64, 3)
        };
        Tile {
            kernel,
            rows,
            tokens,
            threads: 128,
            // 128 bytes of each row.
            shared: stages * (rows + tokens) * 128,
            convert: Some(convert),
            few: 3,
        }
    }

    /// The tile of the kernel that every module has.
    fn on_any_gpu(weights: &Weights, grouped: &Grouped, multiprocessors: usize) -> Tile {
        let (rows, tokens) = (64, 64);
        let leaves_idle = grouped.tiles(weights.n_out, rows, tokens) < multiprocessors;
        Tile {
            kernel: MAT_MUL,
            rows,
            tokens,
            threads: THREADS,
            shared: 0,
            convert: None,
            few: if leaves_idle { 32 } else { 8 },
        }
    }
}
