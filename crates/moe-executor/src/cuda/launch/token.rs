//! The selected experts of one token, in two fused kernels that prefetch weights into shared memory. Each exists in two variants:
//! with all rows of a block in shared memory ("whole"), and with rows that are read in stages ("staged").

use cudarc::driver::{CudaStream, LaunchConfig};
use moe_gguf::GgmlType;

use super::products::code;
use super::{GateUp, Kernels, Weights, of_type};
use crate::cuda::kernel::{Kernel, kernels};
use crate::cuda::module::{Arg, args};
use crate::cuda::{Ptr, Result};

// The last parameters are the layout of shared memory: `Plan::layout`.
kernels! {
    GATE_UP = "gate_up" => (
        gate: Ptr, up: Ptr, ids: Ptr, expert_size: U64, row_size: U32, gate_bias: Ptr, up_bias: Ptr, x: Ptr, n_in: U32,
        n_out: U32, glu: U32, hidden: Ptr, codes: Ptr, groups: Ptr,
        stages: U32, bytes: U32, units: U32, segment: U32, staged: U32, slots: U32,
    );
    GATE_UP_WHOLE = "gate_up_whole" => (
        gate: Ptr, up: Ptr, ids: Ptr, expert_size: U64, row_size: U32, gate_bias: Ptr, up_bias: Ptr, x: Ptr, n_in: U32,
        n_out: U32, glu: U32, hidden: Ptr, codes: Ptr, groups: Ptr,
        segment: U32, staged: U32,
    );
    DOWN = "down" => (
        weights: Ptr, ids: Ptr, router: Ptr, k: U32, expert_size: U64, row_size: U32, bias: Ptr, quantized: Ptr, n_in: U32,
        n_out: U32, out: Ptr,
        stages: U32, bytes: U32, units: U32, segment: U32, staged: U32, slots: U32,
    );
    DOWN_WHOLE = "down_whole" => (
        weights: Ptr, ids: Ptr, router: Ptr, k: U32, expert_size: U64, row_size: U32, bias: Ptr, quantized: Ptr, n_in: U32,
        n_out: U32, out: Ptr,
        segment: U32, staged: U32,
    );
}

/// `out = Σ router[i] · (weights[ids[i]] · hidden[i] + bias[ids[i]])` over the experts `i` of one token.
#[derive(Clone, Copy, Debug)]
pub struct Down {
    /// Down matrices, one per expert.
    pub weights: Weights,
    /// f32 `(n_expert, n_out)`, or null.
    pub bias: Ptr,
    /// i32 `(k)`, each less than `n_expert`. Like `router`, computed before gate and up: the kernel reads both early.
    pub ids: Ptr,
    /// f32 `(k)`: router weights.
    pub router: Ptr,
    /// Number of selected experts.
    pub k: usize,
    /// `(k, n_in)`: hidden activations, as [`Kernels::experts_gate_up`] quantizes them.
    pub quantized: Ptr,
    /// f32 `(n_out)`.
    pub out: Ptr,
}

/// Warps and rows of a gate-and-up block, and ring-buffer slots per warp in shared memory, as in token_staged.cuh.
const GATE_WARPS: usize = 16;
const GATE_ROWS: usize = 32;
const SLOTS: usize = 2;
/// Warps of a down block if a stage is a complete row, and if a row has several stages.
const DOWN_WARPS: [usize; 2] = [8, 16];
/// Limits of shared memory per block in bytes. With the first one, two blocks fit on a multiprocessor of an H100, or one on
/// smaller GPUs. The second one is for down blocks with one stage per row: two of them fit in addition to one gate-and-up block.
const SHARED: usize = 102 << 10;
const SHARED_ONE_STAGE: usize = 64 << 10;
/// Upper limit of the static shared memory of the kernels in bytes.
const STATIC: usize = 384;
/// Largest number of experts per token: one lane each.
const MAX_EXPERTS_USED: usize = 32;
/// For the kernels with whole rows: threads per block, row pairs per gate-and-up block, rows per down block, and the limits of
/// shared memory per gate-and-up block and per down block in bytes. Two gate-and-up blocks and one down block fit on a
/// multiprocessor of an H100.
const WHOLE_THREADS: usize = 256;
const WHOLE_PAIRS: usize = 2 * GATE_ROWS / 2;
const WHOLE_ROWS: usize = 16;
const SHARED_WHOLE: [usize; 2] = [80 << 10, 64 << 10];

/// Shared memory of a staged kernel: `Cut` in token_staged.cuh. Sizes are in bytes.
#[derive(Clone, Copy)]
struct StagedRows {
    /// Stages per row.
    stages: usize,
    /// Size of a stage.
    bytes: usize,
    /// Units of [`unit`] weights per stage.
    units: usize,
    /// Size of a slot: a stage, aligned.
    segment: usize,
    /// Size of the quantized activations.
    staged: usize,
    /// Slots per warp and row.
    slots: usize,
    /// Total size per block.
    shared: usize,
}

/// Number of weights that a lane processes at a time.
fn unit(ty: GgmlType) -> usize {
    match ty {
        GgmlType::Q4_K | GgmlType::Q5_K | GgmlType::Q6_K => 64,
        _ => 32,
    }
}

/// The smallest number of stages per row with which `n` quantized activations and at least `slots` slots for each of `rows` rows
/// of each of `warps` warps fit into `limit` bytes. `None` if they never fit.
fn staged_rows(
    weights: &Weights,
    (warps, slots, rows): (usize, usize, usize),
    n: usize,
    limit: usize,
) -> Option<StagedRows> {
    let unit = unit(weights.ty);
    let staged = Kernels::scratch_size(1, n).next_multiple_of(16);
    let block = weights.ty.block_size() as usize;
    let pieces = weights.n_in / block;
    let fits = |stages: usize| {
        let bytes = weights.row_size / stages;
        // A stage is copied with its offset within 16 bytes.
        let segment = (bytes + 15).next_multiple_of(16);
        let slots = stages.clamp(slots, SLOTS);
        let shared = staged + warps * slots * rows * segment;
        let layout = StagedRows {
            stages,
            bytes,
            units: weights.n_in / stages / unit,
            segment,
            staged,
            slots,
            shared,
        };
        (shared <= limit).then_some(layout)
    };
    (1..=pieces)
        .filter(|stages| pieces.is_multiple_of(*stages))
        .find_map(fits)
}

/// Shared memory of a kernel with whole rows: `segment` and `staged` in token_whole.cuh. Sizes are in bytes.
#[derive(Clone, Copy)]
pub(super) struct WholeRows {
    /// Size of a segment of consecutive rows, aligned.
    pub segment: usize,
    /// Size of the quantized activations.
    pub staged: usize,
    /// Total size per block.
    pub shared: usize,
}

/// The layout of `segments` segments of `rows` rows each, and `n` quantized activations. `None` if they do not fit into `limit`
/// bytes.
pub(super) fn whole_rows(
    weights: &Weights,
    (segments, rows): (usize, usize),
    n: usize,
    limit: usize,
) -> Option<WholeRows> {
    // A segment is copied with its offset within 16 bytes.
    let slack = if weights.row_size.is_multiple_of(16) {
        0
    } else {
        15
    };
    let segment = (rows * weights.row_size + slack).next_multiple_of(16);
    let staged = Kernels::scratch_size(1, n).next_multiple_of(16);
    let shared = staged + segments * segment;
    let layout = WholeRows {
        segment,
        staged,
        shared,
    };
    (shared <= limit).then_some(layout)
}

/// A kernel and its block.
struct Plan {
    kernel: Kernel,
    threads: usize,
    /// Rows per block.
    rows: usize,
    /// Shared memory per block in bytes.
    shared: usize,
    /// The layout of shared memory: the last arguments of the kernel.
    layout: Vec<Arg>,
}

impl StagedRows {
    /// `kernel` with this layout, and blocks of `threads` threads and `rows` rows.
    fn plan(&self, kernel: Kernel, threads: usize, rows: usize) -> Plan {
        let layout = args![
            self.stages,
            self.bytes,
            self.units,
            self.segment,
            self.staged,
            self.slots,
        ];
        Plan {
            kernel,
            threads,
            rows,
            shared: self.shared,
            layout: layout.into(),
        }
    }
}

impl WholeRows {
    /// `kernel` with this layout, and blocks of `rows` rows.
    fn plan(&self, kernel: Kernel, rows: usize) -> Plan {
        Plan {
            kernel,
            threads: WHOLE_THREADS,
            rows,
            shared: self.shared,
            layout: args![self.segment, self.staged].into(),
        }
    }
}

impl Plan {
    /// The grid for `n_out` rows of each of `experts` experts.
    fn grid(&self, n_out: usize, experts: usize) -> LaunchConfig {
        LaunchConfig {
            grid_dim: (n_out.div_ceil(self.rows) as u32, experts as u32, 1),
            block_dim: (self.threads as u32, 1, 1),
            shared_mem_bytes: self.shared as u32,
        }
    }
}

impl Kernels {
    /// Gate, up and their activation for the experts of one token. Returns whether the results are also quantized, or `None` if
    /// no kernel supports the type and the shape.
    pub(super) fn token_gate_up(
        &self,
        stream: &CudaStream,
        product: &GateUp,
    ) -> Result<Option<bool>> {
        let gate = &product.gate;
        let Some(module) = of_type(&self.token, gate.ty) else {
            return Ok(None);
        };
        let Some(plan) = self.plan_gate_up(gate) else {
            return Ok(None);
        };
        // A group of 32 values must not span two experts.
        let codes = if gate.n_out.is_multiple_of(32) {
            product.quantized
        } else {
            Ptr::NULL
        };
        let groups = codes.offset(product.k * gate.n_out);
        let is_quantized = product.x.quantized != Ptr::NULL;
        let x = if is_quantized {
            product.x.quantized
        } else {
            self.quantize(stream, gate, product.x.x, gate.n_in, product.scratch)?;
            product.scratch
        };
        let args = args![
            gate.ptr,
            product.up.ptr,
            product.ids,
            gate.expert_size,
            gate.row_size,
            product.gate_bias,
            product.up_bias,
            x,
            gate.n_in,
            gate.n_out,
            code(Some(product.glu)),
            product.out,
            codes,
            groups,
        ];
        let args = [&args[..], &plan.layout].concat();
        let grid = plan.grid(gate.n_out, product.k);
        // The kernel reads a quantized `x` before it waits for the previous kernel.
        if is_quantized {
            module.launch(stream, plan.kernel, grid, &args)?
        } else {
            module.launch_after(stream, plan.kernel, grid, &args)?
        }
        Ok(Some(codes != Ptr::NULL))
    }

    /// Whether the fused kernels support experts of a type.
    #[cfg(test)]
    pub fn supports_token(ty: GgmlType) -> bool {
        of_type(&crate::cuda::module::TOKEN, ty).is_some()
    }

    /// Down products of the experts of one token and their weighted sum. Returns `false` if no kernel supports the type and the
    /// shape.
    ///
    /// # Errors
    /// A driver error.
    pub fn down(&self, stream: &CudaStream, product: &Down) -> Result<bool> {
        let (weights, k) = (&product.weights, product.k);
        let Some(module) = of_type(&self.token, weights.ty) else {
            return Ok(false);
        };
        let Some(plan) = self.plan_down(weights, k) else {
            return Ok(false);
        };
        let args = args![
            weights.ptr,
            product.ids,
            product.router,
            k,
            weights.expert_size,
            weights.row_size,
            product.bias,
            product.quantized,
            weights.n_in,
            weights.n_out,
            product.out,
        ];
        let args = [&args[..], &plan.layout].concat();
        module.launch(stream, plan.kernel, plan.grid(weights.n_out, 1), &args)?;
        Ok(true)
    }

    /// Shared memory that a block may use: `bytes`, or less if the GPU has less.
    pub(super) fn shared_up_to(&self, bytes: usize) -> usize {
        bytes.min(self.shared.saturating_sub(STATIC))
    }

    /// The kernel for gate and up of a shape; `None` if their rows do not fit into shared memory.
    fn plan_gate_up(&self, gate: &Weights) -> Option<Plan> {
        let limit = self.shared_up_to(SHARED_WHOLE[0]);
        if gate.n_out.is_multiple_of(4)
            && let Some(whole) = whole_rows(gate, (WHOLE_PAIRS, 2), gate.n_in, limit)
        {
            return Some(whole.plan(GATE_UP_WHOLE, GATE_ROWS));
        }
        // A warp processes several row pairs one after the other, so it can use all slots even if a row has one stage.
        let limit = self.shared_up_to(SHARED);
        let staged = staged_rows(gate, (GATE_WARPS, SLOTS, 2), gate.n_in, limit)?;
        Some(staged.plan(GATE_UP, GATE_WARPS * 32, GATE_ROWS))
    }

    /// The kernel for down of a shape; `None` if the rows do not fit into shared memory.
    fn plan_down(&self, weights: &Weights, k: usize) -> Option<Plan> {
        if k == 0 || k > MAX_EXPERTS_USED || !weights.expert_size.is_multiple_of(16) {
            return None;
        }
        let n = k * weights.n_in;
        let limit = self.shared_up_to(SHARED_WHOLE[1]);
        if weights.n_out.is_multiple_of(2)
            && let Some(whole) = whole_rows(weights, (k, WHOLE_ROWS), n, limit)
        {
            return Some(whole.plan(DOWN_WHOLE, WHOLE_ROWS));
        }
        let [few, many] = DOWN_WARPS;
        let single = staged_rows(weights, (few, 1, k), n, self.shared_up_to(SHARED_ONE_STAGE));
        let (staged, warps) = match single.filter(|staged| staged.stages == 1) {
            Some(staged) => (staged, few),
            None => (
                staged_rows(weights, (many, 1, k), n, self.shared_up_to(SHARED))?,
                many,
            ),
        };
        Some(staged.plan(DOWN, warps * 32, warps))
    }
}
