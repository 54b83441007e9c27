//! Norms, sums, activations, rotary embedding, and copies of rows.

use cudarc::driver::{CudaStream, LaunchConfig};

use super::products::code;
use super::{Kernels, grid};
use crate::cpu::glu::Glu;
use crate::cpu::map::Map;
use crate::cuda::kernel::kernels;
use crate::cuda::module::args;
use crate::cuda::{Ptr, Result};
use crate::hparams::{NormKind, RopeLayout};

kernels! {
    RMS_NORM = "rms_norm" => (x: Ptr, weight: Ptr, eps: F32, width: U32, out: Ptr);
    RMS_NORM_ROW = "rms_norm_row" => (
        x: Ptr, weight: Ptr, eps: F32, width: U32, out: Ptr, codes: Ptr, groups: Ptr,
    );
    ADD = "add" => (a: Ptr, b: Ptr, n: U64, out: Ptr);
    SCALE_ROWS_BY_SIGMOID = "scale_rows_by_sigmoid" => (x: Ptr, score: Ptr, width: U32);
    GLU = "glu" => (gate: Ptr, up: Ptr, glu: U32, n: U64);
    MAP = "map" => (x: Ptr, function: U32, a: F32, n: U64);
    MULTIPLY = "multiply" => (
        x: Ptr, factors: Ptr, ids: Ptr, rows_per: U32, width: U32, group: U32, per_row: U32, out: Ptr,
    );
    COPY_COLUMNS = "copy_columns" => (x: Ptr, row_width: U32, first: U32, width: U32, out: Ptr);
    GROUP_NORM = "group_norm" => (
        x: Ptr, weight: Ptr, bias: Ptr, is_layer_norm: Bool, eps: F32, width: U32, n_weights: U32, out: Ptr,
    );
    GET_ROWS = "get_rows" => (x: Ptr, rows: Ptr, width: U32, out: Ptr);
    ROPE_HALVES = "rope_halves", ROPE_NEIGHBOURS = "rope_neighbours" => (
        x: Ptr, angles: Ptr, row_width: U32, head_dim: U32, n_dims: U32,
    );
    MARK = "mark" => ();
    ADD_RMS_NORM = "add_rms_norm" => (
        a: Ptr, b: Ptr, sum: Ptr, weight: Ptr, eps: F32, width: U32, out: Ptr, codes: Ptr, groups: Ptr, start_of_add: Ptr,
    );
    JOIN_HEADS = "join_heads" => (
        starts: Ptr, starts_row: U32, starts_head: U32, ends: Ptr, ends_row: U32, ends_head: U32, angles: Ptr, neighbours: U32,
        n_start: U32, n_end: U32, n_head: U32, out: Ptr,
    );
}

/// Threads per block in kernels with one thread per element.
const THREADS: usize = 256;
/// Largest width of `rms_norm_row`: two vectors of four elements for each of 1,024 threads, as in the kernel.
const ROW_WIDTH: usize = 2 * 4 * 1024;

/// Operands of a norm of groups of elements.
pub struct GroupNorm {
    /// `(groups, width)`
    pub x: Ptr,
    /// How it scales the elements.
    pub kind: NormKind,
    /// `(n_weights, width)`, used in turn by the groups; or null.
    pub weight: Ptr,
    /// Number of vectors of weights, at least 1.
    pub n_weights: usize,
    /// `(width)`, added after the multiplication; or null.
    pub bias: Ptr,
    /// Added to the mean of the squares, or to the variance.
    pub eps: f32,
    /// Elements of a group.
    pub width: usize,
    /// Number of groups.
    pub groups: usize,
    /// `(groups, width)`; may be `x`.
    pub out: Ptr,
}

/// Operands of the multiplication of rows by factors: `out[r, i] = x[r / rows_per, i] · factors[f · per_row + i / group]`.
pub struct Multiply {
    /// `(rows / rows_per, width)`
    pub x: Ptr,
    /// The factors.
    pub factors: Ptr,
    /// i32 `(rows)`: `f` for each row; or null, if `f` is the row.
    pub ids: Ptr,
    /// Rows of `out` for each row of `x`.
    pub rows_per: usize,
    /// Number of rows of `out`.
    pub rows: usize,
    /// Elements per row.
    pub width: usize,
    /// Consecutive elements of a row with the same factor.
    pub group: usize,
    /// Factors per row.
    pub per_row: usize,
    /// `(rows, width)`; may be `x` if `rows_per` is 1.
    pub out: Ptr,
}

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

/// A part of each head of rows.
#[derive(Clone, Copy, Debug)]
pub struct HeadPart {
    /// The part of the first head of the first row.
    pub at: Ptr,
    /// Number of elements.
    pub n: usize,
    /// Elements between two rows.
    pub row: usize,
    /// Elements between two heads; 0 if all heads have the same part.
    pub head: usize,
}

impl HeadPart {
    /// No elements.
    pub const EMPTY: HeadPart = HeadPart {
        at: Ptr::NULL,
        n: 0,
        row: 0,
        head: 0,
    };
}

/// Operands of [`Kernels::join_heads`].
pub struct JoinHeads {
    /// First elements of the heads.
    pub starts: HeadPart,
    /// The elements after them.
    pub ends: HeadPart,
    /// f32 `(rows, ends.n)`: angles of the ends in the layout of `cpu::rope`; null if they are not rotated.
    pub angles: Ptr,
    /// Which elements of the ends form pairs.
    pub layout: RopeLayout,
    /// Number of rows.
    pub rows: usize,
    /// Number of heads.
    pub n_head: usize,
    /// f32 `(rows, n_head, starts.n + ends.n)`.
    pub out: Ptr,
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
        let grid = grid(n.div_ceil(THREADS), THREADS);
        let args = args![gate, up, code(Some(glu)), n];
        self.rows.launch(stream, GLU, grid, &args)
    }

    /// Normalizes each group.
    pub fn group_norm(&self, stream: &CudaStream, it: &GroupNorm) -> Result<()> {
        let args = args![
            it.x,
            it.weight,
            it.bias,
            it.kind == NormKind::Layer,
            it.eps,
            it.width,
            it.n_weights,
            it.out,
        ];
        let grid = norm_grid(it.width, it.groups);
        self.rows.launch(stream, GROUP_NORM, grid, &args)
    }

    /// `x[i] = map(x[i])` for `n` elements.
    pub fn map(&self, stream: &CudaStream, map: Map, x: Ptr, n: usize) -> Result<()> {
        let (function, a) = match map {
            Map::Scale(factor) => (0u32, factor),
            Map::Clamp(limit) => (1, limit),
            Map::AtMost(limit) => (2, limit),
            Map::Sigmoid => (3, 0.0),
            Map::Silu => (4, 0.0),
            Map::Tanh => (5, 0.0),
        };
        let grid = grid(n.div_ceil(THREADS), THREADS);
        self.rows
            .launch(stream, MAP, grid, &args![x, function, a, n])
    }

    /// Multiplies rows by factors.
    pub fn multiply(&self, stream: &CudaStream, it: &Multiply) -> Result<()> {
        let args = args![
            it.x,
            it.factors,
            it.ids,
            it.rows_per,
            it.width,
            it.group,
            it.per_row,
            it.out
        ];
        self.rows
            .launch(stream, MULTIPLY, columns(it.rows, it.width), &args)
    }

    /// `out[r] = x[r][first .. first + width]` for rows of `row_width` elements.
    pub fn copy_columns(
        &self,
        stream: &CudaStream,
        x: Ptr,
        (rows, row_width): (usize, usize),
        (first, width): (usize, usize),
        out: Ptr,
    ) -> Result<()> {
        let args = args![x, row_width, first, width, out];
        self.rows
            .launch(stream, COPY_COLUMNS, columns(rows, width), &args)
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

    /// Copies the starts and the ends of heads to `out`, and rotates the ends.
    pub fn join_heads(&self, stream: &CudaStream, it: &JoinHeads) -> Result<()> {
        let (starts, ends) = (it.starts, it.ends);
        let args = args![
            starts.at,
            starts.row,
            starts.head,
            ends.at,
            ends.row,
            ends.head,
            it.angles,
            u32::from(it.layout == RopeLayout::Neighbours),
            starts.n,
            ends.n,
            it.n_head,
            it.out,
        ];
        let grid = columns(it.rows, it.n_head * (starts.n + ends.n));
        self.rows.launch(stream, JOIN_HEADS, grid, &args)
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
