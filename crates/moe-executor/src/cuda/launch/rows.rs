//! Norms, sums, activations, rotations: row by row.

use cudarc::driver::{CudaStream, LaunchConfig};

use super::{Kernels, grid};
use crate::cpu::glu::Glu;
use crate::cuda::kernel::kernels;
use crate::cuda::module::args;
use crate::cuda::{Ptr, Result};
use crate::hparams::RopeLayout;

kernels! {
    RMS_NORM = "rms_norm" => (
        x: Ptr, weight: Ptr, eps: F32, width: U32, out: Ptr, codes: Ptr, groups: Ptr,
    );
    ADD = "add" => (a: Ptr, b: Ptr, n: U64, out: Ptr);
    SCALE_ROWS_BY_SIGMOID = "scale_rows_by_sigmoid" => (x: Ptr, score: Ptr, width: U32);
    SWIGLU = "swiglu", SWIGLU_OAI = "swiglu_oai" => (gate: Ptr, up: Ptr, n: U64);
    GET_ROWS = "get_rows" => (x: Ptr, rows: Ptr, width: U32, out: Ptr);
    STORE_ROWS = "store_rows" => (x: Ptr, positions: Ptr, width: U32, out: Ptr);
    ROPE_HALVES = "rope_halves", ROPE_NEIGHBOURS = "rope_neighbours" => (
        x: Ptr, angles: Ptr, row_width: U32, head_dim: U32, n_dims: U32,
    );
}

/// Threads of a block in kernels that take an element a thread.
const THREADS: usize = 256;

/// Rows to rotate, in place.
pub struct Rope {
    /// `(rows, row_width)`: heads of `head_dim` elements each.
    pub x: Ptr,
    /// Angles as `cpu::rope::angles` makes them, `(rows, n_dims)`.
    pub angles: Ptr,
    /// Rows of `x`.
    pub rows: usize,
    /// Elements of a row.
    pub row_width: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Elements of a head that turn, the first ones.
    pub n_dims: usize,
    /// Which of them turn together.
    pub layout: RopeLayout,
}

impl Kernels {
    /// `out = x / sqrt(mean(x²) + eps) · weight` for each of `groups` groups of `width` elements; `weight (width)`. `out` may
    /// be `x`. One group whose width is whole times 32 is quantized, too, into [`Kernels::scratch_size`] bytes at `quantized`,
    /// if that is not null.
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
        let codes = if groups == 1 && width.is_multiple_of(32) {
            quantized
        } else {
            Ptr::NULL
        };
        let args = args![x, weight, eps, width, out, codes, codes.offset(width)];
        self.rows
            .launch(stream, RMS_NORM, norm_grid(width, groups), &args)
    }

    /// `out = a + b`, `n` elements each. `out` may be `a` or `b`.
    pub fn add(&self, stream: &CudaStream, a: Ptr, b: Ptr, n: usize, out: Ptr) -> Result<()> {
        let grid = grid(n.div_ceil(THREADS), THREADS);
        self.rows.launch(stream, ADD, grid, &args![a, b, n, out])
    }

    /// Multiplies every row of `x (rows, width)` by the sigmoid of its own `score (rows)`, in place.
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

    /// Replaces every of the `n` values of `gate` by the activation of it and its value of `up`.
    pub fn glu(&self, stream: &CudaStream, glu: Glu, gate: Ptr, up: Ptr, n: usize) -> Result<()> {
        let kernel = match glu {
            Glu::Swiglu => SWIGLU,
            Glu::SwigluOai => SWIGLU_OAI,
        };
        let grid = grid(n.div_ceil(THREADS), THREADS);
        self.rows.launch(stream, kernel, grid, &args![gate, up, n])
    }

    /// `out[i] = x[rows[i]]`, rows of `width` elements; `rows (n_rows)` u32, all within `x`.
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

    /// `out[positions[i]] = x[i]`, `rows` rows of `width` elements; `positions (rows)` u32, all within `out`.
    pub fn store_rows(
        &self,
        stream: &CudaStream,
        x: Ptr,
        positions: Ptr,
        rows: usize,
        width: usize,
        out: Ptr,
    ) -> Result<()> {
        let args = args![x, positions, width, out];
        self.rows
            .launch(stream, STORE_ROWS, columns(rows, width), &args)
    }

    /// Rotates every head of every row by the angles of the row.
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

/// A block a group: whole warps, about four elements a thread, which keeps the many small groups of heads cheap.
fn norm_grid(width: usize, groups: usize) -> LaunchConfig {
    grid(groups, (width / 4).next_multiple_of(32).clamp(32, 512))
}

/// Blocks (row, part of its columns).
fn columns(rows: usize, width: usize) -> LaunchConfig {
    let mut grid = grid(rows, THREADS);
    grid.grid_dim.1 = u32::try_from(width.div_ceil(THREADS)).unwrap_or(u32::MAX);
    grid
}
