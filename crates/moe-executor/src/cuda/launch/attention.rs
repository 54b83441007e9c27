//! Attention: selects a kernel, and splits the positions among blocks.

use cudarc::driver::{CudaStream, LaunchConfig};

use super::store::{Cached, Combine, Halves};
use super::{Kernels, grid, of_type, tiles};
use crate::cpu::attention::Shape;
use crate::cuda::kernel::{Kernel, kernels};
use crate::cuda::module::{Module, args};
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
        value_dim: U32, window: U32, heads: U32, splits: U32, k_stride: U32, v_stride: U32, types: U32, scale: F32, softcap: F32, out: Ptr, parts: Ptr,
    );
}

/// Threads per block of these kernels.
const THREADS: usize = 128;
/// Largest number of splits of the positions, as in the kernel that combines them.
pub(super) const MAX_SPLITS: usize = 128;
/// Smallest numbers of tokens and of query rows (tokens times query heads per KV head) for the tiled kernels. Below, they are
/// slower.
const TILE_TOKENS: usize = 8;
const TILE_ROWS: usize = 32;
/// From this number of query rows on, a cache in Q8_0 is rounded to F16 for the kernels on tensor cores, in scratch memory of at most
/// this size in bytes.
const HALVES_ROWS: usize = 256;
pub(super) const HALVES_SIZE: usize = 128 << 20;

/// Operands of attention. The addresses `q`, `out` and `scratch` are multiples of 16 bytes, those of keys and values multiples of
/// four elements in F32 and F16 (of 16 bytes if heads have a multiple of eight elements), and of a block in Q8_0. If `v` is at the address of
/// `k`, there is one KV head, and its values are the first elements of its keys. In heads of more than 256 elements, this is the case if
/// values are narrower than keys and there is one KV head.
pub struct Attention<'a> {
    /// Head counts, head sizes, window and scale.
    pub shape: &'a Shape,
    /// Queries `(n_tokens, n_head, head_dim)`.
    pub q: Ptr,
    /// Keys `(position, n_head_kv, head_dim)` of the sequence; with `sequences`, of the first one in the cache.
    pub k: Cached,
    /// Values `(position, n_head_kv, value_dim)`, like the keys.
    pub v: Cached,
    /// Elements between two positions in `k` and in `v`.
    pub strides: [usize; 2],
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
    /// Results `(n_tokens, n_head, value_dim)`.
    pub out: Ptr,
    /// Memory of [`Kernels::attention_scratch_size`] bytes.
    pub scratch: Ptr,
}

/// Kernel and grid of a call.
pub(super) struct Plan<'a> {
    pub module: &'a Module,
    pub kernel: Kernel,
    /// Threads per block.
    pub threads: usize,
    /// Blocks per split.
    pub blocks: usize,
    /// Query heads per block.
    pub heads: usize,
    /// Number of parts into which the positions are split.
    pub splits: usize,
    /// Dynamic shared memory in bytes.
    pub shared: usize,
    /// Number of positions whose keys and values must be rounded to F16 first. Keys and values have the same width.
    pub halves: usize,
}

impl Plan<'_> {
    /// Bytes of the rounded keys, or values.
    pub fn halves_size(&self, shape: &Shape) -> usize {
        self.halves * shape.n_head_kv * shape.head_dim * size_of::<u16>()
    }
}

impl Kernels {
    /// Scratch memory in bytes for `n_tokens` tokens of one sequence, or of several ones, at positions up to `last_position`, with
    /// keys and values of `types`.
    ///
    /// # Errors
    /// As [`Kernels::attention`].
    pub fn attention_scratch_size(
        &self,
        shape: &Shape,
        types: [CacheType; 2],
        n_tokens: usize,
        last_position: usize,
    ) -> Result<usize> {
        let mut bytes = 0;
        for of_several in [false, true] {
            let plan = self.plan(shape, types, n_tokens, last_position, of_several)?;
            let parts = match plan.splits {
                1 => 0,
                splits => n_tokens * shape.n_head * splits * (shape.value_dim + 2),
            };
            bytes = bytes.max(2 * plan.halves_size(shape) + parts * size_of::<f32>());
        }
        Ok(bytes)
    }

    /// `out[t] = softmax(scale · q[t] · kᵀ) · v` for each head, over the positions that are visible to token `t`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if `head_dim` or `value_dim` is not a multiple of 4 in 4..=256, or of the block size of the cache (in wide
    /// heads, up to 576 and 512); or a driver error.
    pub fn attention(&self, stream: &CudaStream, it: &Attention) -> Result<()> {
        let shape = it.shape;
        let types = [it.k.ty, it.v.ty];
        let of_several = it.sequences != Ptr::NULL;
        let plan = self.plan(shape, types, it.n_tokens, it.last_position, of_several)?;
        let in_keys = it.k.at == it.v.at;
        if plan.kernel.name == tiles::SHARED_512.name && !in_keys {
            return Err(unsupported(
                "shared heads whose values are not in the keys".into(),
            ));
        }
        let (mut k, mut v, mut strides) = (it.k.at, it.v.at, it.strides);
        let mut parts = it.scratch;
        if plan.halves > 0 {
            let width = shape.n_head_kv * shape.head_dim;
            let halves = Halves {
                k,
                v,
                types: numbers(types),
                rows: plan.halves,
                width,
                strides,
                out: it.scratch,
            };
            self.round_to_halves(stream, &halves)?;
            let bytes = plan.halves_size(shape);
            let of_values = if in_keys { 0 } else { bytes };
            (k, v, strides) = (it.scratch, it.scratch.offset(of_values), [width; 2]);
            parts = it.scratch.offset(of_values + bytes);
        }
        let args = args![
            it.q,
            k,
            v,
            it.positions,
            it.sequences,
            it.sinks,
            it.n_tokens,
            shape.n_head,
            shape.n_head_kv,
            shape.head_dim,
            shape.value_dim,
            window(shape),
            plan.heads,
            plan.splits,
            strides[0],
            strides[1],
            numbers(types),
            shape.scale,
            shape.softcap.unwrap_or(0.0),
            it.out,
            parts,
        ];
        let blocks = grid(plan.blocks, plan.threads);
        let grid_config = LaunchConfig {
            grid_dim: (blocks.grid_dim.0, plan.splits as u32, 1),
            shared_mem_bytes: plan.shared as u32,
            ..blocks
        };
        match it.n_tokens {
            1 => plan
                .module
                .launch(stream, plan.kernel, grid_config, &args)?,
            _ => plan
                .module
                .launch_after(stream, plan.kernel, grid_config, &args)?,
        }
        if plan.splits == 1 {
            return Ok(());
        }
        let combine = Combine {
            parts,
            sinks: it.sinks,
            n_tokens: it.n_tokens,
            n_head: shape.n_head,
            head_dim: shape.value_dim,
            splits: plan.splits,
            out: it.out,
        };
        self.combine(stream, &combine)
    }

    /// `of_several`: whether the tokens are of several sequences, so that they share no keys.
    fn plan(
        &self,
        shape: &Shape,
        types: [CacheType; 2],
        n_tokens: usize,
        last_position: usize,
        of_several: bool,
    ) -> Result<Plan<'_>> {
        let dims = [shape.head_dim, shape.value_dim];
        if dims.iter().any(|d| *d == 0 || !d.is_multiple_of(4)) {
            let what = format!("a head size of {dims:?} (supported: multiples of 4)");
            return Err(unsupported(what));
        }
        let [k_type, v_type] = types;
        let no_kernel = || {
            unsupported(format!(
                "heads of {dims:?} elements with a cache of type {k_type} and {v_type}"
            ))
        };
        let blocks_of = |(ty, d): (CacheType, usize)| ty != CacheType::Q8_0 || d.is_multiple_of(32);
        if !types.into_iter().zip(dims).all(blocks_of) {
            return Err(no_kernel());
        }
        if is_wide(shape) {
            let plan = self.plan_wide(shape, types, n_tokens, last_position, of_several);
            return plan.ok_or_else(no_kernel);
        }
        let d = shape.head_dim.max(shape.value_dim);
        let module = |ty| of_type(&self.attention_of, ty).ok_or_else(no_kernel);
        let per_kv = shape.n_head / shape.n_head_kv;
        // Positions that are visible to at least one token.
        let seen = shape.visible(last_position).len() + n_tokens.saturating_sub(1);
        let seen = seen.min(last_position + 1);
        let tiled = !of_several && n_tokens >= TILE_TOKENS && n_tokens * per_kv >= TILE_ROWS;
        let has_tensor_cores = self.attention.capability() >= tiles::CAPABILITY;
        let is_aligned = dims.iter().all(|d| d.is_multiple_of(tiles::ELEMENTS));
        // The kernels on tensor cores do not bound scores.
        if has_tensor_cores && is_aligned && shape.softcap.is_none() {
            let module = module(Some(CacheType::F16))?;
            if types == [CacheType::F16; 2] {
                return Ok(if tiled {
                    self.plan_tiles(module, shape, n_tokens, last_position)
                } else {
                    self.plan_one(module, shape, n_tokens, last_position)
                });
            }
            let is_exact = types.contains(&CacheType::F32) || dims[0] != dims[1];
            if tiled && !is_exact && n_tokens * per_kv >= HALVES_ROWS {
                let plan = Plan {
                    halves: last_position + 1,
                    ..self.plan_tiles(module, shape, n_tokens, last_position)
                };
                // All positions are rounded, also those before the windows.
                if plan.halves <= 4 * seen && 2 * plan.halves_size(shape) <= HALVES_SIZE {
                    return Ok(plan);
                }
            }
        }
        let same = (k_type == v_type).then_some(k_type);
        // With tensor cores, the module for F16 has no other kernels.
        let module = module(same.filter(|ty| !has_tensor_cores || *ty != CacheType::F16))?;
        if tiled {
            let (kernel, rows, tile) = match d {
                ..=128 => (TOKENS_128, 64, 32),
                _ => (TOKENS_256, 32, 16),
            };
            let (heads, pieces) = share(shape, rows);
            let blocks = n_tokens.div_ceil(rows / heads) * shape.n_head_kv * pieces;
            return Ok(Plan {
                module,
                kernel,
                threads: THREADS,
                blocks,
                heads,
                splits: self.splits(blocks, 2, seen.div_ceil(2 * tile)),
                shared: ((rows + tile) * (d + 4) + rows * (tile + 4)) * size_of::<f32>(),
                halves: 0,
            });
        }
        let (kernel, most) = match (per_kv, d) {
            (1, ..=128) => (TOKEN_1_128, 1),
            (2..=4, ..=128) => (TOKEN_4_128, 4),
            (_, ..=128) => (TOKEN_8_128, 8),
            (1, _) => (TOKEN_1_256, 1),
            _ => (TOKEN_4_256, 4),
        };
        let (heads, pieces) = share(shape, most);
        let blocks = n_tokens * shape.n_head_kv * pieces;
        Ok(Plan {
            module,
            kernel,
            threads: THREADS,
            blocks,
            heads,
            splits: self.splits(blocks, 4, seen.div_ceil(64)),
            shared: 0,
            halves: 0,
        })
    }

    /// The number of splits with which every multiprocessor has `wanted` blocks, at most `pieces`.
    pub(super) fn splits(&self, blocks: usize, wanted: usize, pieces: usize) -> usize {
        let idle = (wanted * self.multiprocessors) / blocks.max(1);
        idle.min(pieces).clamp(1, MAX_SPLITS)
    }
}

/// Whether heads are too wide for the kernels of this file.
fn is_wide(shape: &Shape) -> bool {
    shape.head_dim.max(shape.value_dim) > 256
}

fn unsupported(what: String) -> Error {
    let kernel = "attention";
    Error::Unsupported { kernel, what }
}

/// The query heads of a KV head, at most `most` in each of equal pieces: heads of a piece, and number of pieces.
pub(super) fn share(shape: &Shape, most: usize) -> (usize, usize) {
    let per_kv = shape.n_head / shape.n_head_kv;
    let heads = per_kv.div_ceil(per_kv.div_ceil(most));
    (heads, per_kv.div_ceil(heads))
}

/// The visible positions as an argument of kernels: see `first_seen` in attention.cuh.
fn window(shape: &Shape) -> usize {
    let chunk = shape.chunk.map(|length| 1 << 31 | length);
    chunk.or(shape.window).unwrap_or(0)
}

/// The types of keys and values as an argument of kernels.
fn numbers([k, v]: [CacheType; 2]) -> u32 {
    number(k) | number(v) << 16
}

/// The number of a type in cache.cuh.
fn number(ty: CacheType) -> u32 {
    match ty {
        CacheType::F32 => 0,
        CacheType::F16 => 1,
        CacheType::Q8_0 => 2,
    }
}
