//! Products of weights and rows of activations.
//!
//! Quantized weights are multiplied with activations of 8 bits, in integers. One row of activations is quantized by the kernel
//! that made it, or else by the product's own; more of them by a kernel before it, into `scratch`.

use cudarc::driver::{CudaStream, LaunchConfig};
use moe_gguf::GgmlType;

use super::{Kernels, Rows, of_type};
use crate::cpu::glu::Glu;
use crate::cuda::kernel::kernels;
use crate::cuda::module::{self, Module, args};
use crate::cuda::{Error, Ptr, Result};

kernels! {
    MAT_VEC_1 = "mat_vec_1", MAT_VEC_2 = "mat_vec_2", MAT_VEC_GLU = "mat_vec_glu" => (
        weights: Ptr, up: Ptr, table: Ptr, ids: Ptr, expert_size: U64, row_size: U32, bias: Ptr, up_bias: Ptr, x: Ptr,
        quantized: Ptr, n_source: U32, rows_per: U32, n_in: U32, n_out: U32, glu: U32, out: Ptr,
    );
    MAT_VEC_FEW = "mat_vec_few", MAT_MUL = "mat_mul" => (
        weights: Ptr, expert_size: U64, row_size: U32, bias: Ptr, x: Ptr, quantized: Ptr, n_source: U32, list: Ptr,
        bounds: Ptr, wide: Bool, k: U32, rows_per: U32, n_rows: U32, n_in: U32, n_out: U32, glu: U32, out: Ptr,
    );
}

/// Matrices on the device as they lie in a file, at a multiple of 16 bytes. Kernels read sixteen bytes at a time: up to fifteen
/// behind the last row must be readable.
#[derive(Clone, Copy, Debug)]
pub struct Weights {
    /// The first row of the first matrix.
    pub ptr: Ptr,
    /// Type of the rows.
    pub ty: GgmlType,
    /// Elements of a row.
    pub n_in: usize,
    /// Rows of a matrix.
    pub n_out: usize,
    /// Bytes of a row.
    pub row_size: usize,
    /// Bytes from one expert's matrix to the next.
    pub expert_size: usize,
}

/// Up to so many rows a warp multiplies one row of weights with all of them.
const FEW_ROWS: usize = 8;
/// Threads of every kernel here, warps of eight.
const THREADS: usize = 256;
const WARPS: usize = THREADS / 32;
/// Rows of weights and of activations of a tile.
const TILE: usize = 64;
/// Blocks of a matrix-times-vector kernel that a multiprocessor has at a time: VEC_BLOCKS in mat_vec.cuh.
const BLOCKS: usize = 4;
/// Up to so many products of a row with a matrix are begun early.
const FEW_ENTRIES: usize = 32;
/// Shared memory that every device has.
const SHARED: usize = 48 << 10;

/// What a product of one row of activations for each matrix is made of; `up` and `up_bias` with GLU alone.
pub(super) struct One<'a> {
    pub weights: &'a Weights,
    pub up: Ptr,
    /// Addresses of the matrices, one an entry; null: they lie behind `weights`.
    pub table: Ptr,
    /// Null: all entries are of the first matrix.
    pub ids: Ptr,
    pub bias: Ptr,
    pub up_bias: Ptr,
    pub x: Rows,
    pub entries: usize,
    /// Entries that read the same row of `x`.
    pub rows_per: usize,
    /// [`code`] of what is done to the products.
    pub glu: u32,
    pub out: Ptr,
}

/// What other products are made of.
pub(super) struct Many<'a> {
    pub weights: &'a Weights,
    pub bias: Ptr,
    pub x: Ptr,
    /// Rows of `x`.
    pub rows: usize,
    pub scratch: Ptr,
    pub grouped: Grouped,
    pub glu: u32,
    pub out: Ptr,
}

/// The entries that each matrix is multiplied with.
pub(super) struct Grouped {
    /// Sorted entries, or null for those of a plain product: its rows.
    pub list: Ptr,
    pub bounds: Ptr,
    pub wide: bool,
    pub k: usize,
    pub rows_per: usize,
    pub entries: usize,
    pub n_expert: usize,
}

/// How the kernels name an activation; 0 is none.
pub(super) fn code(glu: Option<Glu>) -> u32 {
    match glu {
        None => 0,
        Some(Glu::Swiglu) => 1,
        Some(Glu::SwigluOai) => 2,
    }
}

impl Kernels {
    /// Whether there are products for weights of a type.
    pub fn supports(ty: GgmlType) -> bool {
        of_type(&module::PRODUCTS, ty).is_some()
    }

    /// Bytes of scratch memory for a product of `rows` rows of `n_in` activations: a code an element; a scale and the sums of
    /// both halves for each 32.
    pub fn scratch_size(rows: usize, n_in: usize) -> usize {
        let n = (rows * n_in).next_multiple_of(32);
        n + n / 32 * 8
    }

    /// `out[i] = weights · x[i] + bias`: `x (rows, n_in)`, `bias (n_out)` or none, `out (rows, n_out)`, `scratch` of
    /// [`Kernels::scratch_size`] bytes. Matrix × vector for up to eight rows, else matrix × matrix.
    ///
    /// # Errors
    /// No kernel for the type ([`Kernels::supports`]), or the driver's.
    #[allow(clippy::too_many_arguments)] // three inputs, the rows, one output and its scratch
    pub fn mul_mat(
        &self,
        stream: &CudaStream,
        weights: &Weights,
        bias: Ptr,
        x: Rows,
        rows: usize,
        out: Ptr,
        scratch: Ptr,
    ) -> Result<()> {
        if rows == 1 && weights.shared() <= SHARED {
            let one = One {
                weights,
                up: Ptr::NULL,
                table: Ptr::NULL,
                ids: Ptr::NULL,
                bias,
                up_bias: Ptr::NULL,
                x,
                entries: 1,
                rows_per: 1,
                glu: 0,
                out,
            };
            return self.mat_vec(stream, &one);
        }
        let x = x.x;
        self.quantize(stream, weights, x, rows * weights.n_in, scratch)?;
        let grouped = Grouped {
            list: Ptr::NULL,
            bounds: Ptr::NULL,
            wide: false,
            k: 1,
            rows_per: 1,
            entries: rows,
            n_expert: 1,
        };
        let many = Many {
            weights,
            bias,
            x,
            rows,
            scratch,
            grouped,
            glu: 0,
            out,
        };
        self.mat_mul(stream, &many)
    }

    /// Quantizes `n` activations if the weights are multiplied with quantized ones.
    pub(super) fn quantize(
        &self,
        stream: &CudaStream,
        weights: &Weights,
        x: Ptr,
        n: usize,
        scratch: Ptr,
    ) -> Result<()> {
        if !weights.is_quantized() {
            return Ok(());
        }
        self.start_quantize(stream, x, n, scratch)
    }

    /// Matrix × vector, an entry a matrix.
    pub(super) fn mat_vec(&self, stream: &CudaStream, one: &One) -> Result<()> {
        let weights = one.weights;
        let n_out = weights.n_out;
        // Two rows a warp share what is read of the activations, unless that leaves too few warps.
        let fused = one.up != Ptr::NULL;
        let pairs = n_out * one.entries >= self.multiprocessors * 64;
        let (kernel, sets) = match (fused, pairs) {
            (true, _) => (MAT_VEC_GLU, n_out),
            (false, true) => (MAT_VEC_2, n_out.div_ceil(2)),
            (false, false) => (MAT_VEC_1, n_out),
        };
        // No more blocks than run at a time, since each has the activations to itself; the same number of rounds for each.
        let at_a_time = (self.multiprocessors * BLOCKS / one.entries.max(1)).max(1);
        let blocks = sets.div_ceil(WARPS);
        let rounds = blocks.div_ceil(at_a_time).max(1);
        let grid = LaunchConfig {
            grid_dim: (count(blocks.div_ceil(rounds)), count(one.entries), 1),
            block_dim: (THREADS as u32, 1, 1),
            shared_mem_bytes: weights.shared() as u32,
        };
        let args = args![
            weights.ptr,
            one.up,
            one.table,
            one.ids,
            weights.expert_size,
            weights.row_size,
            one.bias,
            one.up_bias,
            one.x.x,
            one.x.quantized,
            one.entries / one.rows_per.max(1),
            one.rows_per,
            weights.n_in,
            n_out,
            one.glu,
            one.out,
        ];
        let module = self.products(weights.ty)?;
        if one.entries <= FEW_ENTRIES {
            module.launch(stream, kernel, grid, &args)
        } else {
            module.launch_after(stream, kernel, grid, &args)
        }
    }

    /// Matrices times several rows each, quantized before.
    pub(super) fn mat_mul(&self, stream: &CudaStream, many: &Many) -> Result<()> {
        let (weights, grouped) = (many.weights, &many.grouped);
        let n_out = weights.n_out;
        let per_expert = grouped.entries.div_ceil(grouped.n_expert.max(1));
        let (kernel, x, z) = if per_expert <= FEW_ROWS {
            (MAT_VEC_FEW, n_out.div_ceil(2).div_ceil(WARPS), 1)
        } else {
            // Experts that are chosen more often than others have more tiles; blocks without one end at once.
            let tiles = 4 * per_expert.div_ceil(TILE);
            let most = grouped.entries.div_ceil(TILE);
            (MAT_MUL, n_out.div_ceil(TILE), tiles.min(most).min(0xffff))
        };
        let grid = LaunchConfig {
            grid_dim: (count(x), count(grouped.n_expert), count(z)),
            block_dim: (THREADS as u32, 1, 1),
            shared_mem_bytes: 0,
        };
        let grid = match grouped.entries {
            0 => LaunchConfig {
                grid_dim: (0, 0, 0),
                ..grid
            },
            _ => grid,
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
        self.products(weights.ty)?
            .launch_after(stream, kernel, grid, &args)
    }

    fn products(&self, ty: GgmlType) -> Result<&Module> {
        of_type(&self.products, ty).ok_or(Error::Unsupported {
            kernel: "mul_mat",
            what: format!("weights of type {ty}"),
        })
    }
}

impl Weights {
    pub(super) fn is_quantized(&self) -> bool {
        self.ty.block_size() > 1
    }

    /// Bytes of shared memory for a quantized row of activations.
    fn shared(&self) -> usize {
        if self.is_quantized() {
            Kernels::scratch_size(1, self.n_in)
        } else {
            0
        }
    }
}

/// A dimension of a grid; more than it can count is refused by the driver, not cut.
fn count(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}
