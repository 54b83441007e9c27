//! Products of weights and rows of activations.
//!
//! Quantized weights are multiplied with 8-bit activations in integer arithmetic. The kernel that computes a single row quantizes
//! it, or else the product kernel does. Several rows are quantized into `scratch` by a separate kernel before the product
//! (`mat_mul.rs`).

use cudarc::driver::{CudaStream, LaunchConfig};
use moe_gguf::GgmlType;

use super::mat_mul::{Grouped, Many};
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
    MAT_VEC_THREE = "mat_vec_three" => (
        w_0: Ptr, w_1: Ptr, w_2: Ptr, row_size: U32, bias_0: Ptr, bias_1: Ptr, bias_2: Ptr, x: Ptr, quantized: Ptr, n_in: U32,
        n_0: U32, n_1: U32, n_2: U32, out_0: Ptr, out_1: Ptr, out_2: Ptr,
    );
}

/// Matrices in GPU memory in the format of the file, aligned to 16 bytes. Kernels read 16 bytes at a time, so up to 15 bytes
/// after the last row must be readable.
#[derive(Clone, Copy, Debug)]
pub struct Weights {
    /// First row of the first matrix.
    pub ptr: Ptr,
    /// Type of the weights.
    pub ty: GgmlType,
    /// Elements per row.
    pub n_in: usize,
    /// Rows per matrix.
    pub n_out: usize,
    /// Size of a row in bytes.
    pub row_size: usize,
    /// Offset between the matrices of consecutive experts in bytes.
    pub expert_size: usize,
}

/// Threads and warps per block of the matrix-vector kernels, and of the tiled kernel for any GPU.
pub(super) const THREADS: usize = 256;
pub(super) const WARPS: usize = THREADS / 32;
/// Resident blocks of a matrix-vector kernel per multiprocessor: VEC_BLOCKS in mat_vec.cuh.
const BLOCKS: usize = 4;
/// Rows of weights per multiprocessor from which a warp computes two rows.
pub(super) const MANY_ROWS: usize = 64;
/// Largest number of matrix-vector products in a kernel that may start early.
const FEW_ENTRIES: usize = 32;
/// Shared memory per block on every GPU in bytes.
const SHARED: usize = 48 << 10;

/// Operands of one matrix-vector product per entry. `up` and `up_bias` are only used with an activation.
pub(super) struct One<'a> {
    pub weights: &'a Weights,
    pub up: Ptr,
    /// Address of the matrix of each entry. If null, the matrices are at `weights`.
    pub table: Ptr,
    /// Expert of each entry. If null, all entries use the first matrix.
    pub ids: Ptr,
    pub bias: Ptr,
    pub up_bias: Ptr,
    pub x: Rows,
    pub entries: usize,
    /// Number of entries that read the same row of `x`.
    pub rows_per: usize,
    /// [`code`] of the activation.
    pub glu: u32,
    pub out: Ptr,
}

/// The number of an activation in the kernels (`activate_any` in entries.cuh); 0 without an activation.
pub(super) fn code(glu: Option<Glu>) -> u32 {
    match glu {
        None => 0,
        Some(Glu::Swiglu) => 1,
        Some(Glu::SwigluOai) => 2,
        Some(Glu::Reglu) => 3,
        Some(Glu::Geglu) => 4,
        Some(Glu::SwigluLimited(limit)) => limit.to_bits(),
    }
}

/// Whether all kernels for products can apply an activation to their results.
pub fn ends_products(glu: Glu) -> bool {
    matches!(glu, Glu::Swiglu | Glu::SwigluOai)
}

impl Kernels {
    /// Whether the product kernels support weights of a type.
    pub fn supports(ty: GgmlType) -> bool {
        of_type(&module::PRODUCTS, ty).is_some()
    }

    /// Size in bytes of `rows` quantized rows of `n_in` activations: one byte per element, and 8 bytes per group of 32 for its
    /// scale and the sums of its halves.
    pub fn scratch_size(rows: usize, n_in: usize) -> usize {
        let n = (rows * n_in).next_multiple_of(32);
        n + n / 32 * 8
    }

    /// Size in bytes of `rows` rows of `n_in` activations as a product with several rows reads them: quantized, or in 16 bits.
    pub fn converted_size(rows: usize, n_in: usize) -> usize {
        Kernels::scratch_size(rows, n_in).max(rows * n_in * 2)
    }

    /// `out[i] = weights · x[i] + bias`. `x`: `(rows, n_in)`, `bias`: `(n_out)` or null, `out`: `(rows, n_out)`, `scratch`:
    /// [`Kernels::converted_size`] bytes.
    ///
    /// # Errors
    /// No kernel [supports](Kernels::supports) the type, or a driver error.
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
        if rows == 1 && Kernels::is_router(weights) {
            return self.logits(stream, weights, bias, x.x, out);
        }
        if rows == 1 && self.rows_of_one(stream, weights, bias, x, out)? {
            return Ok(());
        }
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

    /// Quantizes `n` activations if the weights are quantized.
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

    /// One matrix-vector product per entry.
    pub(super) fn mat_vec(&self, stream: &CudaStream, one: &One) -> Result<()> {
        let weights = one.weights;
        let n_out = weights.n_out;
        // A warp computes two rows and reads the activations once for both, unless that leaves too few warps.
        let fused = one.up != Ptr::NULL;
        let pairs = n_out * one.entries >= self.multiprocessors * MANY_ROWS;
        let (kernel, sets) = match (fused, pairs) {
            (true, _) => (MAT_VEC_GLU, n_out),
            (false, true) => (MAT_VEC_2, n_out.div_ceil(2)),
            (false, false) => (MAT_VEC_1, n_out),
        };
        // No more blocks than can be resident, since each loads the activations. All blocks have the same number of rounds.
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

    /// The kernels for weights of a type.
    pub(super) fn products(&self, ty: GgmlType) -> Result<&Module> {
        of_type(&self.products, ty).ok_or(Error::Unsupported {
            kernel: "mul_mat",
            what: format!("type {ty}"),
        })
    }
}

impl Weights {
    pub(super) fn is_quantized(&self) -> bool {
        self.ty.block_size() > 1
    }

    /// Shared memory for a quantized row of activations in bytes.
    fn shared(&self) -> usize {
        if self.is_quantized() {
            Kernels::scratch_size(1, self.n_in)
        } else {
            0
        }
    }
}

/// A dimension of a grid. The driver rejects grids that are too large, so the number must not be truncated.
pub(super) fn count(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}
