//! Attention: selects a kernel, and splits the positions among blocks.

use cudarc::driver::{CudaStream, LaunchConfig};

use super::store::{Cached, Combine};
use super::{Kernels, grid, of_type};
use crate::cpu::attention::Shape;
use crate::cuda::kernel::{Kernel, kernels};
use crate::cuda::module::args;
use crate::cuda::{Error, Ptr, Result};
use crate::kv_cache::CacheType;

kernels! {
    TOKENS_128 = "attention_tokens_128",
    TOKENS_256 = "attention_tokens_256",
    TOKEN_1_128 = "attention_token_1_128",
    TOKEN_4_128 = "attention_token_4_128",
    TOKEN_8_128 = "attention_token_8_128",
    TOKEN_1_256 = "attention_token_1_256",
    TOKEN_4_256 = "attention_token_4_256" => (
        q: Ptr, k: Ptr, v: Ptr, positions: Ptr, sequences: Ptr, sinks: Ptr, n_tokens: U32, n_head: U32, n_head_kv: U32, head_dim: U32,
        window: U32, heads: U32, splits: U32, stride: U32, types: U32, scale: F32, out: Ptr, parts: Ptr,
    );
}

/// Threads per block, as in the kernels.
const THREADS: usize = 128;
/// Largest number of splits of the positions: the kernel that combines them processes them one by one.
const MAX_SPLITS: usize = 128;
/// Smallest numbers of tokens and of query rows (tokens times query heads per KV head) for the tiled kernels. Below, they are
/// slower.
const TILE_TOKENS: usize = 8;
const TILE_ROWS: usize = 32;

/// Operands of attention. The addresses `q`, `out` and `scratch` are multiples of 16 bytes, those of keys and values multiples of
/// four elements in F32 and F16, and of a block in Q8_0.
pub struct Attention<'a> {
    /// Head counts, head size, window and scale.
    pub shape: &'a Shape,
    /// Queries `(n_tokens, n_head, head_dim)`.
    pub q: Ptr,
    /// Keys `(position, n_head_kv, head_dim)` of the sequence; with `sequences`, of the first one in the cache.
    pub k: Cached,
    /// Values, like the keys.
    pub v: Cached,
    /// Elements between two positions in `k` and `v`.
    pub stride: usize,
    /// u32 `(n_tokens)`: position of each token in the KV cache.
    pub positions: Ptr,
    /// u32 `(n_tokens)`: sequence of each token, or null if all tokens are of one sequence.
    pub sequences: Ptr,
    /// Attention sinks `(n_head)`: extra scores in the softmax without a value; or null.
    pub sinks: Ptr,
    /// Number of tokens.
    pub n_tokens: usize,
    /// Largest position. It determines the grid, not the mask.
    pub last_position: usize,
    /// Results `(n_tokens, n_head, head_dim)`.
    pub out: Ptr,
    /// Memory of [`Kernels::attention_scratch_size`] bytes.
    pub scratch: Ptr,
}

/// Kernel and grid of a call.
struct Plan {
    kernel: Kernel,
    /// Blocks per split.
    blocks: usize,
    /// Query heads per block.
    heads: usize,
    /// Number of parts into which the positions are split.
    splits: usize,
    /// Dynamic shared memory in bytes.
    shared: usize,
}

impl Kernels {
    /// Scratch memory in bytes for up to `n_tokens` tokens of one sequence, or of several ones, at positions up to `last_position`.
    ///
    /// # Errors
    /// As [`Kernels::attention`].
    pub fn attention_scratch_size(
        &self,
        shape: &Shape,
        n_tokens: usize,
        last_position: usize,
    ) -> Result<usize> {
        let mut parts = 0;
        for n in 1..=n_tokens {
            for of_several in [false, true] {
                let splits = self.plan(shape, n, last_position, of_several)?.splits;
                if splits > 1 {
                    parts = parts.max(n * shape.n_head * splits);
                }
            }
        }
        Ok(parts * (shape.head_dim + 2) * size_of::<f32>())
    }

    /// `out[t] = softmax(scale · q[t] · kᵀ) · v` for each head, over the positions that are visible to token `t`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if `head_dim` is not a multiple of 4 in 4..=256, or not of the block size of the cache; or a driver
    /// error.
    pub fn attention(&self, stream: &CudaStream, it: &Attention) -> Result<()> {
        let shape = it.shape;
        let is_blocks = [it.k.ty, it.v.ty].contains(&CacheType::Q8_0);
        let same = (it.k.ty == it.v.ty).then_some(it.k.ty);
        let module = of_type(&self.attention_of, same)
            .filter(|_| !is_blocks || shape.head_dim.is_multiple_of(32))
            .ok_or_else(|| Error::Unsupported {
                kernel: "attention",
                what: format!(
                    "heads of {} elements with a cache of type {} and {}",
                    shape.head_dim, it.k.ty, it.v.ty
                ),
            })?;
        let of_several = it.sequences != Ptr::NULL;
        let plan = self.plan(shape, it.n_tokens, it.last_position, of_several)?;
        let args = args![
            it.q,
            it.k.at,
            it.v.at,
            it.positions,
            it.sequences,
            it.sinks,
            it.n_tokens,
            shape.n_head,
            shape.n_head_kv,
            shape.head_dim,
            shape.window.unwrap_or(0),
            plan.heads,
            plan.splits,
            it.stride,
            number(it.k.ty) | number(it.v.ty) << 16,
            shape.scale,
            it.out,
            it.scratch,
        ];
        let grid_config = LaunchConfig {
            grid_dim: (grid(plan.blocks, THREADS).grid_dim.0, plan.splits as u32, 1),
            block_dim: (THREADS as u32, 1, 1),
            shared_mem_bytes: plan.shared as u32,
        };
        match it.n_tokens {
            1 => module.launch(stream, plan.kernel, grid_config, &args)?,
            _ => module.launch_after(stream, plan.kernel, grid_config, &args)?,
        }
        if plan.splits == 1 {
            return Ok(());
        }
        let combine = Combine {
            parts: it.scratch,
            sinks: it.sinks,
            n_tokens: it.n_tokens,
            n_head: shape.n_head,
            head_dim: shape.head_dim,
            splits: plan.splits,
            out: it.out,
        };
        self.combine(stream, &combine, THREADS)
    }

    /// `of_several`: whether the tokens are of several sequences, so that they share no keys.
    fn plan(
        &self,
        shape: &Shape,
        n_tokens: usize,
        last_position: usize,
        of_several: bool,
    ) -> Result<Plan> {
        let d = shape.head_dim;
        if d == 0 || d > 256 || !d.is_multiple_of(4) {
            return Err(Error::Unsupported {
                kernel: "attention",
                what: format!("a head size of {d} (supported: multiples of 4 up to 256)"),
            });
        }
        let per_kv = shape.n_head / shape.n_head_kv;
        // Positions that are visible to at least one token.
        let seen = shape.visible(last_position).len() + n_tokens.saturating_sub(1);
        let seen = seen.min(last_position + 1);
        let share = |most: usize| per_kv.div_ceil(per_kv.div_ceil(most));
        if !of_several && n_tokens >= TILE_TOKENS && n_tokens * per_kv >= TILE_ROWS {
            let (kernel, rows, tile) = match d {
                ..=128 => (TOKENS_128, 64, 32),
                _ => (TOKENS_256, 32, 16),
            };
            let heads = share(rows);
            let blocks = n_tokens.div_ceil(rows / heads) * shape.n_head_kv * per_kv.div_ceil(heads);
            return Ok(Plan {
                kernel,
                blocks,
                heads,
                splits: self.splits(blocks, 2, seen.div_ceil(2 * tile)),
                shared: ((rows + tile) * (d + 4) + rows * (tile + 4)) * size_of::<f32>(),
            });
        }
        let (kernel, most) = match (per_kv, d) {
            (1, ..=128) => (TOKEN_1_128, 1),
            (2..=4, ..=128) => (TOKEN_4_128, 4),
            (_, ..=128) => (TOKEN_8_128, 8),
            (1, _) => (TOKEN_1_256, 1),
            _ => (TOKEN_4_256, 4),
        };
        let heads = share(most);
        let blocks = n_tokens * shape.n_head_kv * per_kv.div_ceil(heads);
        Ok(Plan {
            kernel,
            blocks,
            heads,
            splits: self.splits(blocks, 4, seen.div_ceil(64)),
            shared: 0,
        })
    }

    /// The number of splits with which every multiprocessor has `wanted` blocks, at most `pieces`.
    fn splits(&self, blocks: usize, wanted: usize, pieces: usize) -> usize {
        let idle = (wanted * self.multiprocessors) / blocks.max(1);
        idle.min(pieces).clamp(1, MAX_SPLITS)
    }
}

/// The number of a type in cache.cuh.
fn number(ty: CacheType) -> u32 {
    match ty {
        CacheType::F32 => 0,
        CacheType::F16 => 1,
        CacheType::Q8_0 => 2,
    }
}
