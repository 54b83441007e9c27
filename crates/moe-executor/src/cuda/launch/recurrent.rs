//! Recurrent layers: convolution, gated delta rule, scan of Mamba-2, and the products and copies around them.

use std::ops::Range;

use cudarc::driver::{CudaStream, LaunchConfig};

use super::{Kernels, grid};
use crate::cpu::delta_net::{Heads, KeyHeads};
use crate::cpu::state_space::SsmHeads;
use crate::cuda::kernel::{Kernel, kernels};
use crate::cuda::module::{Arg, args};
use crate::cuda::{Error, Ptr, Result};

kernels! {
    CONVOLUTION = "convolution" => (
        x: Ptr, kernel: Ptr, bias: Ptr, channels: U32, n: U32, silu: Bool, runs: Ptr, parts: U32, states: Ptr, state_stride: U32,
        out: Ptr, row: U32,
    );
    DELTA_NET = "delta_net", DELTA_NET_BY_ELEMENT = "delta_net_by_element" => (
        qkv: Ptr, decay: Ptr, beta: Ptr, n_k: U32, n_v: U32, width: U32, in_turn: Bool, eps: F32, runs: Ptr, states: Ptr, out: Ptr,
    );
    SSM_SCAN = "ssm_scan" => (
        xbc: Ptr, dt: Ptr, a: Ptr, n_head: U32, dim: U32, n_group: U32, n_state: U32, runs: Ptr, states: Ptr, out: Ptr,
    );
    DECAY = "decay" => (x: Ptr, bias: Ptr, factors: Ptr, width: U32, n: U64);
    ADD_SCALED_HEADS = "add_scaled_heads" => (y: Ptr, x: Ptr, factors: Ptr, width: U32, dim: U32, channels: U32);
    ADD_BIAS = "add_bias" => (x: Ptr, bias: Ptr, width: U32, n: U64);
    MULTIPLY_COLUMNS = "multiply_columns" => (
        a: Ptr, row_of_a: U32, b: Ptr, row_of_b: U32, width: U32, out: Ptr,
    );
    COPY_GROUPS = "copy_groups" => (
        x: Ptr, row: U32, group: U32, start_0: U32, n_0: U32, start_1: U32, n_1: U32, start_2: U32, n_2: U32, width: U32, out: Ptr,
    );
}

/// Threads per block in kernels with one thread per element.
const THREADS: usize = 256;
/// Tokens per block of the convolution, as in the kernel.
const TOKENS: usize = 16;
/// Threads per block of the kernels that update the rows of a state.
const ROW_THREADS: usize = 128;
/// Rows of a state in such a block: two for each 16 lanes, as in the kernels.
const ROWS: usize = ROW_THREADS / 16 * 2;
/// Longest row of a state, as in the kernels.
const MAX_ROW: usize = 128;
/// Kernels that update states by more tokens start after the previous kernel has ended.
const SHORT: usize = 8;

/// Consecutive tokens of different sequences, whose states a kernel updates.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Runs {
    /// u32 `(n, 3)`: sequence, first token, number of tokens.
    pub at: Ptr,
    /// Number of sequences.
    pub n: usize,
    /// Largest number of tokens of a sequence.
    pub longest: usize,
}

/// Operands of a causal convolution.
pub struct Convolution {
    /// f32 `(token, channels)`.
    pub x: Ptr,
    /// f32 `(n, channels)`, the oldest input first.
    pub kernel: Ptr,
    /// f32 `(channels)`, or null.
    pub bias: Ptr,
    /// Number of channels.
    pub channels: usize,
    /// Length of the kernels.
    pub n: usize,
    /// Whether the result is multiplied by its sigmoid.
    pub silu: bool,
    /// The tokens.
    pub runs: Runs,
    /// Last inputs f32 `(n - 1, channels)` of the first sequence.
    pub states: Ptr,
    /// Elements between the states of two sequences.
    pub state_stride: usize,
    /// Result f32 `(token, channels)`.
    pub out: Columns,
}

/// Operands of the gated delta rule.
pub struct DeltaNet {
    /// Queries, keys and values f32 `(token, qkv_width)`.
    pub qkv: Ptr,
    /// Logarithms of the decay f32 `(token, n_v)`, or `(token, n_v, key)`.
    pub decay: Ptr,
    /// Whether each element of a key has a decay of its own.
    pub by_element: bool,
    /// Learning rates f32 `(token, n_v)`.
    pub beta: Ptr,
    /// The heads.
    pub heads: Heads,
    /// Added to the squared length of queries and keys.
    pub eps: f32,
    /// The tokens.
    pub runs: Runs,
    /// f32 `(sequence, n_v, value, key)`.
    pub states: Ptr,
    /// Result f32 `(token, n_v, value)`.
    pub out: Ptr,
}

/// Operands of the scan of Mamba-2.
pub struct SsmScan {
    /// `x (head, dim)`, `B (group, state)` and `C (group, state)` of each token, f32 `(token, channels)`.
    pub xbc: Ptr,
    /// Step sizes before the softplus, f32 `(token, head)`.
    pub dt: Ptr,
    /// Decays f32 `(head)`.
    pub a: Ptr,
    /// The heads.
    pub heads: SsmHeads,
    /// The tokens.
    pub runs: Runs,
    /// f32 `(sequence, head, dim, state)`.
    pub states: Ptr,
    /// Result f32 `(token, head, dim)`.
    pub out: Ptr,
}

/// Columns of rows that are `row` elements apart; `at` is the address of the first one.
#[derive(Clone, Copy)]
pub struct Columns {
    /// Address.
    pub at: Ptr,
    /// Elements between two rows.
    pub row: usize,
}

/// Checks that the kernels support states of `rows` rows of `width` elements per head.
///
/// # Errors
/// [`Error::Unsupported`] if one of the numbers is not a multiple of 4, or if `width` is larger than 128.
pub fn check_state(kernel: &'static str, rows: usize, width: usize) -> Result<()> {
    if rows.is_multiple_of(4) && width.is_multiple_of(4) && width <= MAX_ROW {
        return Ok(());
    }
    let what = format!("a state of {rows} × {width} elements per head");
    Err(Error::Unsupported { kernel, what })
}

impl Kernels {
    /// Convolves each channel over the tokens of its sequence, and updates the last inputs.
    pub fn convolution(&self, stream: &CudaStream, it: &Convolution) -> Result<()> {
        let parts = it.runs.longest.div_ceil(TOKENS);
        let args = args![
            it.x,
            it.kernel,
            it.bias,
            it.channels,
            it.n,
            it.silu,
            it.runs.at,
            parts,
            it.states,
            it.state_stride,
            it.out.at,
            it.out.row,
        ];
        let grid = columns(it.runs.n * parts, it.channels);
        self.recurrent.launch(stream, CONVOLUTION, grid, &args)
    }

    /// Computes the gated delta rule for the tokens of each sequence in order, and updates the states. It normalizes queries and keys.
    ///
    /// # Errors
    /// As [`check_state`], or a driver error.
    pub fn delta_net(&self, stream: &CudaStream, it: &DeltaNet) -> Result<()> {
        let Heads {
            n_k,
            n_v,
            width,
            keys,
        } = it.heads;
        let kernel = if it.by_element {
            DELTA_NET_BY_ELEMENT
        } else {
            DELTA_NET
        };
        check_state(kernel.name, width, width)?;
        let args = args![
            it.qkv,
            it.decay,
            it.beta,
            n_k,
            n_v,
            width,
            keys == KeyHeads::InTurn,
            it.eps,
            it.runs.at,
            it.states,
            it.out,
        ];
        self.update_states(stream, kernel, [n_v, width], it.runs, &args)
    }

    /// Computes the scan of Mamba-2 for the tokens of each sequence in order, and updates the states.
    ///
    /// # Errors
    /// As [`check_state`], or a driver error.
    pub fn ssm_scan(&self, stream: &CudaStream, it: &SsmScan) -> Result<()> {
        let SsmHeads {
            n,
            dim,
            n_group,
            n_state,
        } = it.heads;
        check_state(SSM_SCAN.name, dim, n_state)?;
        let args = args![
            it.xbc, it.dt, it.a, n, dim, n_group, n_state, it.runs.at, it.states, it.out,
        ];
        self.update_states(stream, SSM_SCAN, [n, dim], it.runs, &args)
    }

    /// Launches a kernel for all rows of the states of `heads` heads. Blocks of many tokens run long.
    fn update_states(
        &self,
        stream: &CudaStream,
        kernel: Kernel,
        [heads, rows]: [usize; 2],
        runs: Runs,
        args: &[Arg],
    ) -> Result<()> {
        let mut grid = grid(heads * rows.div_ceil(ROWS), ROW_THREADS);
        grid.grid_dim.1 = u32::try_from(runs.n).unwrap_or(u32::MAX);
        if runs.longest > SHORT {
            self.recurrent.launch_after(stream, kernel, grid, args)
        } else {
            self.recurrent.launch(stream, kernel, grid, args)
        }
    }

    /// `x = softplus(x + bias) · factors` for `rows` rows of `width` elements, in place. `bias` and `factors`: `(width)`.
    pub fn decay(
        &self,
        stream: &CudaStream,
        x: Ptr,
        [bias, factors]: [Ptr; 2],
        rows: usize,
        width: usize,
    ) -> Result<()> {
        let n = rows * width;
        let args = args![x, bias, factors, width, n];
        self.recurrent.launch(stream, DECAY, elements(n), &args)
    }

    /// `y (token, head, dim) += x · factor` with a factor for each head; `x` is the start of each row of `xbc (token, channels)`.
    pub fn add_scaled_heads(
        &self,
        stream: &CudaStream,
        y: Ptr,
        xbc: Ptr,
        factors: Ptr,
        heads: SsmHeads,
        tokens: usize,
    ) -> Result<()> {
        let (width, channels) = (heads.width(), heads.channels());
        let args = args![y, xbc, factors, width, heads.dim, channels];
        let grid = columns(tokens, width);
        self.recurrent.launch(stream, ADD_SCALED_HEADS, grid, &args)
    }

    /// `x += bias` for `rows` rows of `width` elements, in place.
    pub fn add_bias(
        &self,
        stream: &CudaStream,
        x: Ptr,
        bias: Ptr,
        rows: usize,
        width: usize,
    ) -> Result<()> {
        let n = rows * width;
        let args = args![x, bias, width, n];
        self.recurrent.launch(stream, ADD_BIAS, elements(n), &args)
    }

    /// `out = a · b` for `rows` rows of `width` elements. `out` may be an operand whose rows have no gaps.
    pub fn multiply_columns(
        &self,
        stream: &CudaStream,
        [a, b]: [Columns; 2],
        rows: usize,
        width: usize,
        out: Ptr,
    ) -> Result<()> {
        let args = args![a.at, a.row, b.at, b.row, width, out];
        let grid = columns(rows, width);
        self.recurrent.launch(stream, MULTIPLY_COLUMNS, grid, &args)
    }

    /// Copies ranges of the columns of each group of `group` columns: a row of `out` has those of all groups, one range after the other.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if there are more than three ranges, or a driver error.
    pub fn copy_groups(
        &self,
        stream: &CudaStream,
        x: Columns,
        rows: usize,
        group: usize,
        ranges: &[Range<usize>],
        out: Ptr,
    ) -> Result<()> {
        if ranges.len() > 3 {
            return Err(Error::Unsupported {
                kernel: COPY_GROUPS.name,
                what: format!("a copy of {} ranges", ranges.len()),
            });
        }
        let range = |i: usize| ranges.get(i).map_or((0, 0), |r| (r.start, r.len()));
        let [(start_0, n_0), (start_1, n_1), (start_2, n_2)] = [0, 1, 2].map(range);
        let width = (n_0 + n_1 + n_2) * (x.row / group.max(1));
        let args = args![
            x.at, x.row, group, start_0, n_0, start_1, n_1, start_2, n_2, width, out
        ];
        let grid = columns(rows, width);
        self.recurrent.launch(stream, COPY_GROUPS, grid, &args)
    }
}

/// A grid over `n` elements.
fn elements(n: usize) -> LaunchConfig {
    grid(n.div_ceil(THREADS), THREADS)
}

/// A grid over rows and chunks of [`THREADS`] columns.
fn columns(rows: usize, width: usize) -> LaunchConfig {
    let mut grid = grid(rows, THREADS);
    grid.grid_dim.1 = u32::try_from(width.div_ceil(THREADS)).unwrap_or(u32::MAX);
    grid
}
