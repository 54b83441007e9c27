//! Norms, sums, activations, rotary embedding, and copies of rows.

use cudarc::driver::{CudaStream, LaunchConfig};

use super::{Kernels, grid};
use crate::cpu::glu::Glu;
use crate::cuda::kernel::kernels;
use crate::cuda::module::args;
use crate::cuda::{Error, Ptr, Result};
use crate::hparams::RopeLayout;

kernels! {
    RMS_NORM = "rms_norm" => (x: Ptr, weight: Ptr, eps: F32, width: U32, out: Ptr);
    RMS_NORM_ROW = "rms_norm_row" => (
        x: Ptr, weight: Ptr, eps: F32, width: U32, out: Ptr, codes: Ptr, groups: Ptr,
    );
    ADD = "add" => (a: Ptr, b: Ptr, n: U64, out: Ptr);
    SCALE_ROWS_BY_SIGMOID = "scale_rows_by_sigmoid" => (x: Ptr, score: Ptr, width: U32);
    SWIGLU = "swiglu", SWIGLU_OAI = "swiglu_oai" => (gate: Ptr, up: Ptr, n: U64);
    GET_ROWS = "get_rows" => (x: Ptr, rows: Ptr, width: U32, out: Ptr);
    ROPE_HALVES = "rope_halves", ROPE_NEIGHBOURS = "rope_neighbours" => (
        x: Ptr, angles: Ptr, row_width: U32, head_dim: U32, n_dims: U32,
    );
    MARK = "mark" => ();
    ADD_RMS_NORM = "add_rms_norm" => (
        a: Ptr, b: Ptr, sum: Ptr, weight: Ptr, eps: F32, width: U32, out: Ptr, codes: Ptr, groups: Ptr, start_of_add: Ptr,
    );
}

/// Threads per block in kernels with one thread per element.
const THREADS: usize = 256;
/// Largest width of `rms_norm_row`: two vectors of four elements for each of 1,024 threads, as in the kernel.
const ROW_WIDTH: usize = 2 * 4 * 1024;

/// Operands of the rotary embedding, which works in place.
pub struct Rope {
    /// `(rows, row_width)`: heads of `head_dim` elements each.
    pub x: Ptr,
    /// `(rows, n_dims)`: angles in the layout of `cpu::rope`.
    pub angles: Ptr,
    /// Number of rows of `x`.
    pub rows: usize,
    /// Elements per row.
    pub row_width: usize,
    /// Elements per head.
    pub head_dim: usize,
    /// Rotated elements per head: the first ones.
    pub n_dims: usize,
    /// Which elements form pairs.
    pub layout: RopeLayout,
}

/// The error for an activation without a kernel.
pub(super) fn without_kernel(glu: Glu) -> Error {
    Error::Unsupported {
        kernel: "swiglu",
        what: format!("the activation {glu:?}"),
    }
}

impl Kernels {
    /// Stores the time at which all earlier work on the stream is complete, if a start is wanted ([`Launches::store_start`]).
    ///
    /// # Errors
    /// A driver error.
    ///
    /// [`Launches::store_start`]: crate::cuda::launches::Launches::store_start
    pub fn mark(&self, stream: &CudaStream) -> Result<()> {
        self.rows.launch(stream, MARK, grid(1, 1), &[])
    }

    /// `out = x / sqrt(mean(x²) + eps) · weight` for each of `groups` groups of `width` elements. `weight`: `(width)`. `out` may
    /// be `x`. If there is one group, `width` is a multiple of 32 and `quantized` is not null, the result is also quantized into
    /// [`Kernels::scratch_size`] bytes at `quantized`.
    ///
    /// # Errors
    /// A driver error.
    #[allow(clippy::too_many_arguments)]
    pub fn rms_norm(
        &self,
        stream: &CudaStream,
        x: Ptr,
        weight: Ptr,
        eps: f32,
        width: usize,
        groups: usize,
        out: Ptr,
        quantized: Ptr,
    ) -> Result<()> {
        let is_row = groups == 1 && width.is_multiple_of(32);
        if is_row && width <= ROW_WIDTH {
            let args = args![
                x,
                weight,
                eps,
                width,
                out,
                quantized,
                quantized.offset(width)
            ];
            let grid = grid(1, (width / 4).next_multiple_of(32).min(1024));
            return self.rows.launch(stream, RMS_NORM_ROW, grid, &args);
        }
        let args = args![x, weight, eps, width, out];
        self.rows
            .launch(stream, RMS_NORM, norm_grid(width, groups), &args)?;
        if is_row {
            self.quantize_row(stream, out, width, quantized)?;
        }
        Ok(())
    }

    /// `out = a + b` with `n` elements. `out` may be `a` or `b`.
    pub fn add(&self, stream: &CudaStream, a: Ptr, b: Ptr, n: usize, out: Ptr) -> Result<()> {
        let grid = grid(n.div_ceil(THREADS), THREADS);
        self.rows.launch(stream, ADD, grid, &args![a, b, n, out])
    }

    /// Multiplies every row of `x` by the sigmoid of its score, in place. `x`: `(rows, width)`, `score`: `(rows)`.
    pub fn scale_rows_by_sigmoid(
        &self,
        stream: &CudaStream,
        x: Ptr,
        score: Ptr,
        rows: usize,
        width: usize,
    ) -> Result<()> {
        let (grid, args) = (columns(rows, width), args![x, score, width]);
        self.rows.launch(stream, SCALE_ROWS_BY_SIGMOID, grid, &args)
    }

    /// `gate = glu(gate, up)` with `n` elements.
    pub fn glu(&self, stream: &CudaStream, glu: Glu, gate: Ptr, up: Ptr, n: usize) -> Result<()> {
        let kernel = match glu {
            Glu::Swiglu => SWIGLU,
            Glu::SwigluOai => SWIGLU_OAI,
            Glu::Reglu | Glu::Geglu => return Err(without_kernel(glu)),
        };
        let grid = grid(n.div_ceil(THREADS), THREADS);
        self.rows.launch(stream, kernel, grid, &args![gate, up, n])
    }

    /// `out[i] = x[rows[i]]` with rows of `width` elements. `rows`: u32 `(n_rows)`, all less than the number of rows of `x`.
    pub fn get_rows(
        &self,
        stream: &CudaStream,
        x: Ptr,
        rows: Ptr,
        n_rows: usize,
        width: usize,
        out: Ptr,
    ) -> Result<()> {
        let args = args![x, rows, width, out];
        self.rows
            .launch(stream, GET_ROWS, columns(n_rows, width), &args)
    }

    /// Rotates the pairs of every head of every row by the angles of the row.
    pub fn rope(&self, stream: &CudaStream, it: &Rope) -> Result<()> {
        let kernel = match it.layout {
            RopeLayout::Halves => ROPE_HALVES,
            RopeLayout::Neighbours => ROPE_NEIGHBOURS,
        };
        let pairs = it.row_width / it.head_dim.max(1) * (it.n_dims / 2);
        let args = args![it.x, it.angles, it.row_width, it.head_dim, it.n_dims];
        self.rows
            .launch(stream, kernel, columns(it.rows, pairs), &args)
    }
}

/// One block per group with about four elements per thread, so that many small groups (heads) are cheap.
fn norm_grid(width: usize, groups: usize) -> LaunchConfig {
    grid(groups, (width / 4).next_multiple_of(32).clamp(32, 512))
}

/// A grid over rows and chunks of [`THREADS`] columns.
fn columns(rows: usize, width: usize) -> LaunchConfig {
    let mut grid = grid(rows, THREADS);
    grid.grid_dim.1 = u32::try_from(width.div_ceil(THREADS)).unwrap_or(u32::MAX);
    grid
}
