//! The chosen experts of one token: two kernels that read their weights ahead into shared memory, each in two ways: where a block
//! has room for all its rows, and where they come in stages.

use cudarc::driver::{CudaStream, LaunchConfig};
use moe_gguf::GgmlType;

use super::products::code;
use super::{GateUp, Kernels, Weights, of_type};
use crate::cuda::kernel::{Kernel, kernels};
use crate::cuda::module::{Arg, args};
use crate::cuda::{Ptr, Result};

// The last parameters are where things lie in shared memory: `Way::places`.
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

/// `out = Σ weights[i] · (down of expert ids[i] · hidden[i] + bias of expert ids[i])`, the experts of one token.
#[derive(Clone, Copy, Debug)]
pub struct Down {
    /// A matrix an expert.
    pub weights: Weights,
    /// f32 `(n_expert, n_out)`, or none.
    pub bias: Ptr,
    /// i32 `(k)`, each below `n_expert`; with `router` there since before gate and up.
    pub ids: Ptr,
    /// f32 `(k)`: the router's weights.
    pub router: Ptr,
    /// Experts of the token.
    pub k: usize,
    /// `(k, n_in)`: what [`Kernels::experts_gate_up`] computed and quantized.
    pub quantized: Ptr,
    /// f32 `(n_out)`.
    pub out: Ptr,
}

/// Warps of a block of gate and up, rows of one, stages that a warp has in shared memory: as in token_staged.cuh.
const GATE_WARPS: usize = 16;
const GATE_ROWS: usize = 32;
const SLOTS: usize = 2;
/// Warps of a block of down: few where whole rows find room, more where they come in stages.
const DOWN_WARPS: [usize; 2] = [8, 16];
/// Shared memory of a block, so that two find room on a multiprocessor that has as much as an H100, or one on any other; and
/// of a block of down whose rows come in one stage, so that two do beside one of gate and up.
const SHARED: usize = 102 << 10;
const SHARED_OF_ROWS: usize = 64 << 10;
/// Shared memory that the kernels have beside, at most.
const STATIC: usize = 384;
/// Experts of a token, at most: a lane each.
const MAX_EXPERTS_USED: usize = 32;
/// Of the kernels with whole rows: threads of a block, pairs of rows that a block of gate and up has, rows of one of down; and
/// shared memory of a block of either, so that a multiprocessor of an H100 has two of gate and up and beside them one of down.
const WHOLE_THREADS: usize = 256;
const WHOLE_PAIRS: usize = 2 * GATE_ROWS / 2;
const WHOLE_ROWS: usize = 16;
const SHARED_OF_WHOLE: [usize; 2] = [80 << 10, 64 << 10];

/// How rows are cut into stages: `Cut` in token_staged.cuh.
#[derive(Clone, Copy)]
struct Cut {
    stages: usize,
    bytes: usize,
    units: usize,
    segment: usize,
    staged: usize,
    slots: usize,
    /// Shared memory of a block.
    shared: usize,
}

/// Pieces that the lanes of a warp take, in weights.
fn unit(ty: GgmlType) -> usize {
    match ty {
        GgmlType::Q4_K | GgmlType::Q5_K | GgmlType::Q6_K => 64,
        _ => 32,
    }
}

/// Cuts rows of `weights` into the fewest stages with which a block of `warps` warps, each with the stages of `rows` rows in
/// `slots` slots or more, and `n` staged activations fit into `limit` bytes.
fn cut(
    weights: &Weights,
    (warps, slots, rows): (usize, usize, usize),
    n: usize,
    limit: usize,
) -> Option<Cut> {
    let unit = unit(weights.ty);
    let staged = Kernels::scratch_size(1, n).next_multiple_of(16);
    let block = weights.ty.block_size() as usize;
    let pieces = weights.n_in / block;
    let fits = |stages: usize| {
        let bytes = weights.row_size / stages;
        // It begins anywhere among sixteen bytes.
        let segment = (bytes + 15).next_multiple_of(16);
        let slots = stages.clamp(slots, SLOTS);
        let shared = staged + warps * slots * rows * segment;
        let cut = Cut {
            stages,
            bytes,
            units: weights.n_in / stages / unit,
            segment,
            staged,
            slots,
            shared,
        };
        (shared <= limit).then_some(cut)
    };
    (1..=pieces)
        .filter(|stages| pieces.is_multiple_of(*stages))
        .find_map(fits)
}

/// Whole rows in shared memory: `segment` and `staged` of token_whole.cuh.
#[derive(Clone, Copy)]
struct Whole {
    segment: usize,
    staged: usize,
    /// Shared memory of a block.
    shared: usize,
}

/// Whole rows: `segments` segments of `rows` rows of `weights` each, and `n` staged activations, if they fit into `limit` bytes.
fn whole(
    weights: &Weights,
    (segments, rows): (usize, usize),
    n: usize,
    limit: usize,
) -> Option<Whole> {
    // A segment begins anywhere among sixteen bytes.
    let slack = if weights.row_size.is_multiple_of(16) {
        0
    } else {
        15
    };
    let segment = (rows * weights.row_size + slack).next_multiple_of(16);
    let staged = Kernels::scratch_size(1, n).next_multiple_of(16);
    let shared = staged + segments * segment;
    let whole = Whole {
        segment,
        staged,
        shared,
    };
    (shared <= limit).then_some(whole)
}

/// A kernel, and what a block of it is like.
struct Way {
    kernel: Kernel,
    threads: usize,
    /// Rows of a block.
    rows: usize,
    /// Bytes of shared memory.
    shared: usize,
    /// Where things lie there: the kernel's last arguments.
    places: Vec<Arg>,
}

impl Cut {
    /// By `kernel`, whose blocks have `threads` threads and `rows` rows.
    fn by(&self, kernel: Kernel, threads: usize, rows: usize) -> Way {
        let places = args![
            self.stages,
            self.bytes,
            self.units,
            self.segment,
            self.staged,
            self.slots,
        ];
        Way {
            kernel,
            threads,
            rows,
            shared: self.shared,
            places: places.into(),
        }
    }
}

impl Whole {
    /// By `kernel`, whose blocks have `rows` rows.
    fn by(&self, kernel: Kernel, rows: usize) -> Way {
        Way {
            kernel,
            threads: WHOLE_THREADS,
            rows,
            shared: self.shared,
            places: args![self.segment, self.staged].into(),
        }
    }
}

impl Way {
    /// Blocks for `n_out` rows of each of `experts`.
    fn grid(&self, n_out: usize, experts: usize) -> LaunchConfig {
        LaunchConfig {
            grid_dim: (n_out.div_ceil(self.rows) as u32, experts as u32, 1),
            block_dim: (self.threads as u32, 1, 1),
            shared_mem_bytes: self.shared as u32,
        }
    }
}

impl Kernels {
    /// Gate, up and their activation of one token's experts, if there are kernels for the type and room. Gives whether the
    /// results are quantized, too.
    pub(super) fn token_gate_up(
        &self,
        stream: &CudaStream,
        product: &GateUp,
    ) -> Result<Option<bool>> {
        let gate = &product.gate;
        let Some(module) = of_type(&self.token, gate.ty) else {
            return Ok(None);
        };
        let Some(way) = self.gate_up_way(gate) else {
            return Ok(None);
        };
        // Groups of 32 must not reach over the end of an expert's row.
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
        let args = [&args[..], &way.places].concat();
        let grid = way.grid(gate.n_out, product.k);
        // It reads x early: what the kernel before it makes, it must not.
        if is_quantized {
            module.launch(stream, way.kernel, grid, &args)?
        } else {
            module.launch_after(stream, way.kernel, grid, &args)?
        }
        Ok(Some(codes != Ptr::NULL))
    }

    /// Whether there are kernels for one token's experts of a type.
    #[cfg(test)]
    pub fn supports_token(ty: GgmlType) -> bool {
        of_type(&crate::cuda::module::TOKEN, ty).is_some()
    }

    /// The weighted sum of one token's experts, if there is a kernel for the type and room. Gives whether it did.
    ///
    /// # Errors
    /// The driver's.
    pub fn down(&self, stream: &CudaStream, product: &Down) -> Result<bool> {
        let (weights, k) = (&product.weights, product.k);
        let Some(module) = of_type(&self.token, weights.ty) else {
            return Ok(false);
        };
        let Some(way) = self.down_way(weights, k) else {
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
        let args = [&args[..], &way.places].concat();
        module.launch(stream, way.kernel, way.grid(weights.n_out, 1), &args)?;
        Ok(true)
    }

    fn shared_up_to(&self, bytes: usize) -> usize {
        bytes.min(self.shared.saturating_sub(STATIC))
    }

    /// The way for gate and up of a shape, if there is room for one.
    fn gate_up_way(&self, gate: &Weights) -> Option<Way> {
        let limit = self.shared_up_to(SHARED_OF_WHOLE[0]);
        if gate.n_out.is_multiple_of(4)
            && let Some(whole) = whole(gate, (WHOLE_PAIRS, 2), gate.n_in, limit)
        {
            return Some(whole.by(GATE_UP_WHOLE, GATE_ROWS));
        }
        // A warp has several rows, one after the other: it can always use all slots.
        let limit = self.shared_up_to(SHARED);
        let cut = cut(gate, (GATE_WARPS, SLOTS, 2), gate.n_in, limit)?;
        Some(cut.by(GATE_UP, GATE_WARPS * 32, GATE_ROWS))
    }

    /// The way for down of a shape, if there is room for one.
    fn down_way(&self, weights: &Weights, k: usize) -> Option<Way> {
        if k == 0 || k > MAX_EXPERTS_USED || !weights.expert_size.is_multiple_of(16) {
            return None;
        }
        let n = k * weights.n_in;
        let limit = self.shared_up_to(SHARED_OF_WHOLE[1]);
        if weights.n_out.is_multiple_of(2)
            && let Some(whole) = whole(weights, (k, WHOLE_ROWS), n, limit)
        {
            return Some(whole.by(DOWN_WHOLE, WHOLE_ROWS));
        }
        let [few, many] = DOWN_WARPS;
        let in_one = cut(weights, (few, 1, k), n, self.shared_up_to(SHARED_OF_ROWS));
        let (cut, warps) = match in_one.filter(|cut| cut.stages == 1) {
            Some(cut) => (cut, few),
            None => (
                cut(weights, (many, 1, k), n, self.shared_up_to(SHARED))?,
                many,
            ),
        };
        Some(cut.by(DOWN, warps * 32, warps))
    }
}
