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
    STORE_F32 = "store_rows_f32", STORE_F16 = "store_rows_f16", STORE_Q8_0 = "store_rows_q8_0" => (
        x: Ptr, at: Ptr, width: U32, out: Ptr,
    );
}

/// Threads per block in the kernels for stores.
const THREADS: usize = 256;

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

    /// Combines the partial results of attention.
    pub(super) fn combine(&self, stream: &CudaStream, it: &Combine, threads: usize) -> Result<()> {
        let args = args![
            it.parts,
            it.sinks,
            it.n_head,
            it.head_dim,
            it.splits,
            it.out
        ];
        let rows = LaunchConfig {
            // A multiple of the unrolled loop of the kernel, which reads eight values at a time.
            shared_mem_bytes: (it.splits.next_multiple_of(8) * size_of::<f32>()) as u32,
            ..grid(it.n_tokens * it.n_head, threads)
        };
        self.attention.launch(stream, COMBINE, rows, &args)
    }
}
