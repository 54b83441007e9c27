//! The chosen experts of one token: two kernels that read their weights ahead into shared memory.

use cudarc::driver::{CudaStream, LaunchConfig};
use moe_gguf::GgmlType;

use super::products::code;
use super::{GateUp, Kernels, Weights, of_type};
use crate::cuda::module::{self, Arg, args};
use crate::cuda::{Ptr, Result};

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

/// Warps of a block of gate and up, rows of one, stages that a warp has in shared memory: as in token.cuh.
const GATE_WARPS: usize = 16;
const GATE_ROWS: usize = 32;
const SLOTS: usize = 2;
/// Warps of a block of down: few where whole rows find room, more where they come in stages.
const DOWN_WARPS: [usize; 2] = [8, 16];
/// Shared memory of a block, so that two find room on a multiprocessor that has as much as an H100, or one on any other; and
/// of a block of down with whole rows, so that three do beside one of gate and up.
const SHARED: usize = 102 << 10;
const SHARED_OF_ROWS: usize = 64 << 10;
/// Shared memory that the kernels have beside, at most.
const STATIC: usize = 256;
/// Experts of a token, at most: a lane each.
const MAX_EXPERTS_USED: usize = 32;

/// How rows are cut into stages: `Cut` in token.cuh.
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

impl Cut {
    fn args(&self) -> [Arg; 6] {
        args![
            self.stages,
            self.bytes,
            self.units,
            self.segment,
            self.staged,
            self.slots,
        ]
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
        let limit = self.shared_up_to(SHARED);
        // A warp has several rows, one after the other: it can always use all slots.
        let cut = cut(gate, (GATE_WARPS, SLOTS, 2), gate.n_in, limit);
        let (Some(module), Some(cut)) = (of_type(&self.token, gate.ty), cut) else {
            return Ok(None);
        };
        let grid = LaunchConfig {
            grid_dim: (gate.n_out.div_ceil(GATE_ROWS) as u32, product.k as u32, 1),
            block_dim: (GATE_WARPS as u32 * 32, 1, 1),
            shared_mem_bytes: cut.shared as u32,
        };
        // Groups of 32 must not reach over the end of an expert's row.
        let codes = match gate.n_out.is_multiple_of(32) {
            true => product.quantized,
            false => Ptr::NULL,
        };
        let groups = codes.offset(product.k * gate.n_out);
        let args = args![
            gate.ptr,
            product.up.ptr,
            product.ids,
            gate.expert_size,
            gate.row_size,
            product.gate_bias,
            product.up_bias,
            product.x,
            gate.n_in,
            gate.n_out,
            code(Some(product.glu)),
            product.out,
            codes,
            groups,
        ];
        let args = [&args[..], &cut.args()].concat();
        module.launch(stream, "gate_up", grid, &args)?;
        Ok(Some(codes != Ptr::NULL))
    }

    /// Whether there are kernels for one token's experts of a type.
    pub fn supports_token(ty: GgmlType) -> bool {
        of_type(&module::TOKEN, ty).is_some()
    }

    /// The weighted sum of one token's experts, if there is a kernel for the type and room. Gives whether it did.
    ///
    /// # Errors
    /// The driver's.
    pub fn down(&self, stream: &CudaStream, product: &Down) -> Result<bool> {
        let (weights, k) = (&product.weights, product.k);
        let module = of_type(&self.token, weights.ty);
        let Some((module, (cut, warps))) = module.zip(self.cut_down(weights, k)) else {
            return Ok(false);
        };
        let grid = LaunchConfig {
            grid_dim: (weights.n_out.div_ceil(warps) as u32, 1, 1),
            block_dim: (warps as u32 * 32, 1, 1),
            shared_mem_bytes: cut.shared as u32,
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
        let args = [&args[..], &cut.args()].concat();
        module.launch(stream, "down", grid, &args)?;
        Ok(true)
    }

    fn shared_up_to(&self, bytes: usize) -> usize {
        bytes.min(self.shared.saturating_sub(STATIC))
    }

    /// How down's rows are cut, and the warps of a block.
    fn cut_down(&self, weights: &Weights, k: usize) -> Option<(Cut, usize)> {
        if k == 0 || k > MAX_EXPERTS_USED || !weights.expert_size.is_multiple_of(16) {
            return None;
        }
        let [few, many] = DOWN_WARPS;
        let n = k * weights.n_in;
        let whole = cut(weights, (few, 1, k), n, self.shared_up_to(SHARED_OF_ROWS));
        match whole.filter(|cut| cut.stages == 1) {
            Some(cut) => Some((cut, few)),
            None => {
                let staged = cut(weights, (many, 1, k), n, self.shared_up_to(SHARED));
                staged.map(|cut| (cut, many))
            }
        }
    }
}
