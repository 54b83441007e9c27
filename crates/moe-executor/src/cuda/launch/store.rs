//! Stores to the KV cache, and the combination of partial results of attention.

use cudarc::driver::{CudaStream, LaunchConfig};

use super::{Kernels, grid};
use crate::cuda::kernel::kernels;
use crate::cuda::module::args;
use crate::cuda::{Ptr, Result};
use crate::kv_cache::CacheType;

kernels! {
    COMBINE = "attention_combine" => (
        parts: Ptr, sinks: Ptr, n_head: U32, head_dim: U32, splits: U32, out: Ptr,
    );
    COMBINE_FEW = "attention_combine_few" => (
        parts: Ptr, sinks: Ptr, n_rows: U32, n_head: U32, head_dim: U32, splits: U32, out: Ptr,
    );
    HALVES = "attention_halves" => (
        k: Ptr, v: Ptr, types: U32, n_rows: U32, width: U32, k_stride: U32, v_stride: U32, out: Ptr,
    );
    STORE_F32 = "store_rows_f32", STORE_F16 = "store_rows_f16", STORE_Q8_0 = "store_rows_q8_0" => (
        x: Ptr, at: Ptr, width: U32, out: Ptr,
    );
    ATTENTION_INPUTS = "attention_inputs" => (
        q: Ptr, k: Ptr, v: Ptr, q_out: Ptr, k_out: Ptr, q_weight: Ptr, k_weight: Ptr, eps: F32, angles: Ptr, n_head: U32,
        n_head_kv: U32, head_dim: U32, n_dims: U32, neighbours: U32, at: Ptr, k_cache: Ptr, v_cache: Ptr, type: U32, start_0: Ptr,
        start_1: Ptr, start_2: Ptr, start_3: Ptr, start_4: Ptr, start_5: Ptr, start_6: Ptr,
    );
}

/// Largest number of threads per block.
const THREADS: usize = 256;
/// Up to this number of splits, a thread combines all splits of a row of many.
const FEW_SPLITS: usize = 4;

/// Keys or values, from the first position of a sequence on.
#[derive(Clone, Copy, Debug)]
pub struct Cached {
    /// Their address.
    pub at: Ptr,
    /// Their type.
    pub ty: CacheType,
}

/// Operands of a store to the KV cache.
pub struct Store {
    /// f32 `(rows, width)`.
    pub x: Ptr,
    /// u32 `(rows)`: the row of `out` for each row.
    pub at: Ptr,
    /// Number of rows.
    pub rows: usize,
    /// Elements of a row, a multiple of the block size of the type.
    pub width: usize,
    /// Keys or values of all sequences.
    pub out: Cached,
}

/// Operands of [`Kernels::round_to_halves`].
pub(super) struct Halves {
    /// Keys of a sequence.
    pub k: Ptr,
    /// Values of the sequence; `k` if they are the first elements of the keys.
    pub v: Ptr,
    /// The types of keys and values, as the kernels for attention take them.
    pub types: u32,
    /// Number of positions.
    pub rows: usize,
    /// Elements of keys, or values, at a position.
    pub width: usize,
    /// Elements between two positions in `k` and in `v`.
    pub strides: [usize; 2],
    /// F16 `(2, rows, width)`: keys, then values; without values if `v` is `k`.
    pub out: Ptr,
}

/// Operands of [`Kernels::combine`].
pub(super) struct Combine {
    /// Partial results and the state of each, as the kernels for attention store them.
    pub parts: Ptr,
    /// Attention sinks `(n_head)`, or null.
    pub sinks: Ptr,
    pub n_tokens: usize,
    pub n_head: usize,
    pub head_dim: usize,
    pub splits: usize,
    /// Results `(n_tokens, n_head, head_dim)`.
    pub out: Ptr,
}

impl Kernels {
    /// `out[at[i]] = x[i]`, converted to the type of the cache.
    pub fn store_rows(&self, stream: &CudaStream, it: &Store) -> Result<()> {
        let kernel = match it.out.ty {
            CacheType::F32 => STORE_F32,
            CacheType::F16 => STORE_F16,
            CacheType::Q8_0 => STORE_Q8_0,
        };
        let args = args![it.x, it.at, it.width, it.out.at];
        let mut blocks = grid(it.rows, THREADS);
        blocks.grid_dim.1 = u32::try_from(it.width.div_ceil(THREADS)).unwrap_or(u32::MAX);
        self.attention.launch(stream, kernel, blocks, &args)
    }

    /// Rounds the first positions of keys and values to F16.
    pub(super) fn round_to_halves(&self, stream: &CudaStream, it: &Halves) -> Result<()> {
        let [k_stride, v_stride] = it.strides;
        let args = args![
            it.k, it.v, it.types, it.rows, it.width, k_stride, v_stride, it.out
        ];
        let mut blocks = grid((it.rows * it.width / 4).div_ceil(THREADS), THREADS);
        blocks.grid_dim.1 = if it.v == it.k { 1 } else { 2 };
        self.attention.launch(stream, HALVES, blocks, &args)
    }

    /// Combines the partial results of attention.
    pub(super) fn combine(&self, stream: &CudaStream, it: &Combine) -> Result<()> {
        let (rows, fours) = (it.n_tokens * it.n_head, it.head_dim / 4);
        if it.n_tokens > 1 && it.splits <= FEW_SPLITS {
            let args = args![
                it.parts,
                it.sinks,
                rows,
                it.n_head,
                it.head_dim,
                it.splits,
                it.out
            ];
            let blocks = grid((rows * fours).div_ceil(THREADS), THREADS);
            return self.attention.launch(stream, COMBINE_FEW, blocks, &args);
        }
        let args = args![
            it.parts,
            it.sinks,
            it.n_head,
            it.head_dim,
            it.splits,
            it.out
        ];
        // As many splits at a time as fit in a block.
        let groups = it.splits.min(THREADS / fours);
        let threads = (fours * groups).next_multiple_of(32);
        let blocks = LaunchConfig {
            shared_mem_bytes: (threads * size_of::<[f32; 4]>()) as u32,
            ..grid(rows, threads)
        };
        self.attention.launch(stream, COMBINE, blocks, &args)
    }
}
