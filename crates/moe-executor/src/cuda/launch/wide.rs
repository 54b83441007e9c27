//! Attention of wide heads. On tensor cores, their values are the first elements of their keys, as in latent attention.

use super::attention::{HALVES_SIZE, Plan, share};
use super::tiles::{self, SHARED_512};
use super::{Kernels, of_type};
use crate::cpu::attention::Shape;
use crate::cuda::kernel::kernels;
use crate::kv_cache::CacheType;

kernels! {
    TOKEN_4_576 = "attention_token_4_576" => (
        q: Ptr, k: Ptr, v: Ptr, positions: Ptr, sequences: Ptr, sinks: Ptr, n_tokens: U32, n_head: U32, n_head_kv: U32, head_dim: U32,
        value_dim: U32, window: U32, heads: U32, splits: U32, k_stride: U32, v_stride: U32, types: U32, scale: F32, softcap: F32, out: Ptr, parts: Ptr,
    );
}

/// Largest number of elements of keys, and of values.
const MAX_DIMS: [usize; 2] = [576, 512];
/// Query rows of a block on tensor cores, positions of a tile, and number of warps, as in the kernel.
const ROWS: usize = 64;
const TILE: usize = 32;
const WARPS: usize = 8;
/// Shared memory of that kernel with a fixed size, in bytes, rounded up.
const FIXED: usize = 1 << 10;

impl Kernels {
    /// The plan for tokens of one sequence, or of several ones. `None` if no kernel supports the widths.
    pub(super) fn plan_wide(
        &self,
        shape: &Shape,
        types: [CacheType; 2],
        n_tokens: usize,
        last_position: usize,
        of_several: bool,
    ) -> Option<Plan<'_>> {
        let dims = [shape.head_dim, shape.value_dim];
        if dims[0] < dims[1] || dims.iter().zip(MAX_DIMS).any(|(d, most)| *d > most) {
            return None;
        }
        let visible = shape.visible(last_position).len();
        // Positions that are visible to at least one token.
        let seen = (visible + n_tokens.saturating_sub(1)).min(last_position + 1);
        if let Some(plan) = self.plan_shared(shape, types, (n_tokens, seen), of_several) {
            // A cache in Q8_0 is rounded to F16.
            let halves = match types[0] {
                CacheType::F16 => 0,
                CacheType::F32 | CacheType::Q8_0 => last_position + 1,
            };
            let plan = Plan { halves, ..plan };
            if plan.halves_size(shape) <= HALVES_SIZE {
                return Some(plan);
            }
        }
        let (heads, pieces) = share(shape, 4);
        let blocks = n_tokens * shape.n_head_kv * pieces;
        Some(Plan {
            module: &self.attention_wide,
            kernel: TOKEN_4_576,
            threads: 128,
            blocks,
            heads,
            splits: self.splits(blocks, 4, visible.div_ceil(64)),
            shared: 0,
            halves: 0,
        })
    }

    /// The plan on tensor cores for `n_tokens` tokens that see `seen` positions; `None` if the GPU, the type or the widths do not suit.
    fn plan_shared(
        &self,
        shape: &Shape,
        types: [CacheType; 2],
        (n_tokens, seen): (usize, usize),
        of_several: bool,
    ) -> Option<Plan<'_>> {
        let dims = [shape.head_dim, shape.value_dim];
        if shape.n_head_kv > 1 || dims[0] == dims[1] {
            return None;
        }
        let row = shape.head_dim.next_multiple_of(16) + 8;
        let rows = (ROWS + 2 * TILE) * row * size_of::<u16>();
        let shared = rows + WARPS * 16 * TILE * size_of::<f32>();
        // Rows of several sequences are not rounded.
        let is_suited = match types {
            [CacheType::F16, CacheType::F16] => true,
            [CacheType::Q8_0, CacheType::Q8_0] => !of_several,
            _ => false,
        };
        let fits = shared + FIXED <= self.shared;
        let is_plain = shape.softcap.is_none();
        let is_aligned = dims.iter().all(|d| d.is_multiple_of(tiles::ELEMENTS));
        let has_tensor_cores = self.attention.capability() >= tiles::CAPABILITY;
        if !(is_suited && is_plain && fits && is_aligned && has_tensor_cores) {
            return None;
        }
        let module = of_type(&self.attention_of, Some(CacheType::F16))?;
        let (heads, pieces) = share(shape, ROWS);
        let tokens = if of_several { 1 } else { ROWS / heads };
        let blocks = n_tokens.div_ceil(tokens) * shape.n_head_kv * pieces;
        Some(Plan {
            module,
            kernel: SHARED_512,
            threads: 32 * WARPS,
            blocks,
            heads,
            // The partial result of a block is as large as two tiles.
            splits: self.splits(blocks, 1, seen.div_ceil(2 * TILE)),
            shared,
            halves: 0,
        })
    }
}
