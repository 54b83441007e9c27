//! The kernels that multiply in tiles, and the selection among them.

use moe_gguf::GgmlType;

use super::experts::{CONVERT_BF16, CONVERT_F16};
use super::mat_mul::{Grouped, MAT_MUL};
use super::products::{THREADS, Weights};
use super::tiles::CAPABILITY;
use crate::cuda::kernel::{Kernel, kernels};

kernels! {
    MAT_MUL_64_16 = "mat_mul_64_16", MAT_MUL_64_64 = "mat_mul_64_64", MAT_MUL_128_64 = "mat_mul_128_64" => (
        weights: Ptr, expert_size: U64, row_size: U32, bias: Ptr, x: Ptr, converted: Ptr, n_source: U32, list: Ptr,
        bounds: Ptr, wide: Bool, k: U32, rows_per: U32, n_rows: U32, n_in: U32, n_out: U32, glu: U32, out: Ptr,
    );
}

/// Rows of 16-bit weights that these kernels read have a multiple of this many elements: 16 bytes.
const ELEMENTS: usize = 8;

/// A kernel that computes a tile per block.
#[derive(Clone, Copy)]
pub(super) struct Tile {
    pub kernel: Kernel,
    /// Rows of weights per tile.
    pub rows: usize,
    /// Rows of activations per tile.
    pub tokens: usize,
    /// Threads per block.
    pub threads: usize,
    /// Dynamic shared memory in bytes.
    pub shared: usize,
}

/// The kernel of every GPU. On tensor cores, only modules for floating-point weights have it.
const ANY: Tile = Tile {
    kernel: MAT_MUL,
    rows: 64,
    tokens: 64,
    threads: THREADS,
    shared: 0,
};

/// How a product is computed.
pub(super) struct Choice {
    pub tile: Tile,
    /// The kernel that converts the activations before. They are otherwise quantized already, or read in f32.
    pub convert: Option<Kernel>,
    /// Largest mean number of activation rows per matrix for which the matrix-vector kernel is faster.
    pub few: usize,
}

impl Choice {
    /// The kernels for a product. All limits are measurements on an H200.
    pub fn new(
        weights: &Weights,
        grouped: &Grouped,
        capability: u32,
        multiprocessors: usize,
    ) -> Choice {
        let tiles = |tile: &Tile| grouped.tiles(weights.n_out, tile.rows, tile.tokens);
        let convert = match weights.ty {
            GgmlType::F16 => Some(CONVERT_F16),
            GgmlType::BF16 => Some(CONVERT_BF16),
            _ => None,
        };
        let is_16_bit = convert.is_some() && weights.n_in.is_multiple_of(ELEMENTS);
        if capability < CAPABILITY || !(weights.is_quantized() || is_16_bit) {
            let leaves_idle = tiles(&ANY) < multiprocessors;
            return Choice {
                tile: ANY,
                convert: None,
                few: if leaves_idle { 32 } else { 8 },
            };
        }
        // Large tiles need fewer reads of shared memory, small ones occupy more multiprocessors.
        let [small, medium, large] = on_tensor_cores(weights.ty);
        let tile = if grouped.per_expert() <= small.tokens || tiles(&small) <= 2 * multiprocessors {
            small
        } else if 2 * tiles(&large) < 3 * multiprocessors {
            medium
        } else {
            large
        };
        // The matrix-vector kernel reads weights again for every four rows of activations, but has more blocks.
        let blocks = weights.n_out.div_ceil(small.rows) * grouped.n_expert;
        let few = if convert.is_some() {
            3
        } else if 4 * blocks <= multiprocessors {
            32
        } else if blocks < multiprocessors {
            16
        } else if grouped.n_expert == 1 {
            8
        } else {
            1
        };
        Choice { tile, convert, few }
    }
}

/// Whether the modules for a type have tiles of 128 x 64. With Q4_K and Q8_0, they are at most 5 % faster than those of 64 x 64 on an H200,
/// with MXFP4 10 %.
pub(super) fn has_large_tiles(ty: GgmlType) -> bool {
    ty.block_size() == 1 || ty == GgmlType::MXFP4
}

/// The tiles on tensor cores for a type of weights, in ascending order of their sizes.
pub(super) fn on_tensor_cores(ty: GgmlType) -> [Tile; 3] {
    // 128 bytes of each row in each stage.
    let sixteen_bit = |rows: usize, tokens: usize, stages: usize| stages * (rows + tokens) * 128;
    // Two steps. Q2_K has a scale and a minimum for every 16 weights: `mat_mul_quantized_tiles`.
    let quantized = |rows: usize, tokens: usize| match ty {
        GgmlType::Q2_K => 2 * (208 * rows + 192 * tokens),
        _ => 2 * (180 * rows + 176 * tokens),
    };
    let tile = |kernel, rows, tokens, threads, shared| Tile {
        kernel,
        rows,
        tokens,
        threads,
        shared,
    };
    match ty.block_size() {
        1 => [
            tile(MAT_MUL_64_16, 64, 16, 128, sixteen_bit(64, 16, 6)),
            tile(MAT_MUL_64_64, 64, 64, 128, sixteen_bit(64, 64, 4)),
            tile(MAT_MUL_128_64, 128, 64, 128, sixteen_bit(128, 64, 3)),
        ],
        _ => {
            let medium = tile(MAT_MUL_64_64, 64, 64, 128, quantized(64, 64));
            let large = tile(MAT_MUL_128_64, 128, 64, 256, quantized(128, 64));
            [
                tile(MAT_MUL_64_16, 64, 16, 128, quantized(64, 16)),
                medium,
                if has_large_tiles(ty) { large } else { medium },
            ]
        }
    }
}
