//! Attention over a KV cache in F16 on tensor cores: selects a kernel, and splits the positions among blocks.

use super::Kernels;
use super::attention::{MAX_SPLITS, Plan, share};
use crate::cpu::attention::Shape;
use crate::cuda::kernel::kernels;
use crate::cuda::module::Module;

kernels! {
    TILES_64_64 = "attention_tiles_64_64",
    TILES_64_128 = "attention_tiles_64_128",
    TILES_64_256 = "attention_tiles_64_256",
    TILES_128_64 = "attention_tiles_128_64",
    TILES_128_128 = "attention_tiles_128_128",
    ONE_64 = "attention_one_64",
    ONE_128 = "attention_one_128",
    ONE_256 = "attention_one_256",
    SHARED_512 = "attention_shared_512" => (
        q: Ptr, k: Ptr, v: Ptr, positions: Ptr, sequences: Ptr, sinks: Ptr, n_tokens: U32, n_head: U32, n_head_kv: U32, head_dim: U32,
        value_dim: U32, window: U32, heads: U32, splits: U32, k_stride: U32, v_stride: U32, types: U32, scale: F32, softcap: F32, out: Ptr, parts: Ptr,
    );
}

/// Ten times the compute capability from which on modules have kernels on tensor cores.
pub(super) const CAPABILITY: u32 = 80;
/// Heads have a multiple of this many elements: 16 bytes.
pub(super) const ELEMENTS: usize = 8;
/// Up to the first number of visible positions, blocks have 64 rows; up to the second one, if all blocks then run at the same time.
const VERY_SHORT: usize = 256;
const SHORT: usize = 1536;
/// Threads per block of the tiled kernels.
const THREADS: usize = 128;
/// Positions that a warp of the kernels for single tokens processes at a time.
const STEP: usize = 16;

impl Kernels {
    /// The plan for many tokens of one sequence.
    pub(super) fn plan_tiles<'a>(
        &self,
        module: &'a Module,
        shape: &Shape,
        n_tokens: usize,
        last_position: usize,
    ) -> Plan<'a> {
        let visible = shape.visible(last_position).len();
        // Query heads and tokens of a block with a number of rows, and number of blocks.
        let blocks_of = |rows: usize| {
            let (heads, pieces) = share(shape, rows);
            let tokens = rows / heads;
            let blocks = n_tokens.div_ceil(tokens) * shape.n_head_kv * pieces;
            (heads, tokens, blocks)
        };
        // 128 rows need fewer reads of keys and values. 64 rows occupy more multiprocessors, and see fewer masked positions.
        let (_, few_tokens, few_blocks) = blocks_of(64);
        let fits = few_blocks <= 2 * self.multiprocessors;
        let is_short = visible <= VERY_SHORT || visible <= SHORT && fits;
        let d = shape.head_dim.max(shape.value_dim);
        let rows = if d > 128 || is_short || n_tokens <= few_tokens {
            64
        } else {
            128
        };
        // Elements of a head in shared memory, and positions of a tile.
        let (kernel, padded, tile) = match (rows, d) {
            (64, ..=64) => (TILES_64_64, 64, 64),
            (64, ..=128) => (TILES_64_128, 128, 64),
            (64, _) => (TILES_64_256, 256, 48),
            (_, ..=64) => (TILES_128_64, 64, 128),
            _ => (TILES_128_128, 128, 64),
        };
        let (heads, tokens, blocks) = blocks_of(rows);
        // Positions that the block of the last tokens reads.
        let tiles = (visible + tokens - 1).min(last_position + 1).div_ceil(tile);
        Plan {
            module,
            kernel,
            threads: THREADS,
            blocks,
            heads,
            splits: self.tile_splits(blocks, tiles),
            shared: (rows + 2 * tile) * (padded + 8) * size_of::<u16>(),
            halves: 0,
        }
    }

    /// The plan for single tokens.
    pub(super) fn plan_one<'a>(
        &self,
        module: &'a Module,
        shape: &Shape,
        n_tokens: usize,
        last_position: usize,
    ) -> Plan<'a> {
        // Elements of a head in registers, warps of a block, blocks for each multiprocessor, and the most query heads.
        let (kernel, padded, warps, wanted, most) = match shape.head_dim.max(shape.value_dim) {
            ..=64 => (ONE_64, 64, 8, 2, 16),
            65..=128 => (ONE_128, 128, 4, 2, 16),
            _ => (ONE_256, 256, 8, 1, 8),
        };
        let (heads, pieces) = share(shape, most);
        let blocks = n_tokens * shape.n_head_kv * pieces;
        let steps = shape.visible(last_position).len().div_ceil(STEP * warps);
        // A second step takes less time than the combination of two splits.
        let splits = match steps {
            ..=2 => 1,
            _ => self.splits(blocks, wanted, steps),
        };
        Plan {
            module,
            kernel,
            threads: 32 * warps,
            blocks,
            heads,
            splits,
            shared: warps * heads * (padded + 4) * size_of::<f32>(),
            halves: 0,
        }
    }

    /// The number of splits with which `blocks` blocks of up to `tiles` tiles take the least time. The unit of time is half of what
    /// a block takes for a tile if it has a multiprocessor for itself. Two blocks on one multiprocessor take 1.5 times as long. The
    /// constants of the combination are measurements on an H200.
    fn tile_splits(&self, blocks: usize, tiles: usize) -> usize {
        let places = self.multiprocessors;
        if blocks >= 2 * places {
            return 1;
        }
        let time = |splits: &usize| {
            let all = blocks * splits;
            let rounds = if all <= places {
                2
            } else {
                3 * all.div_ceil(2 * places)
            };
            let combination = if *splits == 1 {
                0
            } else {
                2 + 3 * all / places
            };
            rounds * tiles.div_ceil(*splits) + combination
        };
        (1..=tiles.clamp(1, MAX_SPLITS))
            .min_by_key(time)
            .unwrap_or(1)
    }
}
