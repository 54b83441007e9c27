//! The router of a MoE layer.

use cudarc::driver::CudaStream;
use moe_gguf::GgmlType;

use super::{Kernels, Weights, grid};
use crate::cuda::kernel::kernels;
use crate::cuda::module::args;
use crate::cuda::{Error, Ptr, Result};
use crate::hparams::{Gating, Groups};

kernels! {
    ROUTER_LOGITS = "router_logits" => (weights: Ptr, bias: Ptr, x: Ptr, n_in: U32, out: Ptr);
    ROUTE_1 = "route_1",
    ROUTE_2 = "route_2",
    ROUTE_4 = "route_4",
    ROUTE_8 = "route_8",
    ROUTE_16 = "route_16" => (
        logits: Ptr, selection_bias: Ptr, gating: U32, norm: U32, scale: F32, tokens: U32, n_expert: U32, k: U32,
        n_groups: U32, groups_used: U32, ids: Ptr, weights: Ptr, log: Ptr,
    );
}

/// Largest number of experts: a warp keeps all logits of a token in registers.
pub const MAX_EXPERTS: usize = 512;
/// Elements per thread of `router_logits`, as in the kernel, and its smallest and largest block.
const LOGITS_ELEMENTS: usize = 4 * 4;
const LOGITS_THREADS: [usize; 2] = [256, 1024];
/// Tokens per block, as in the kernel.
const TOKENS: usize = 4;

/// Input and settings of a router.
pub struct Route {
    /// f32 `(tokens, n_expert)`.
    pub logits: Ptr,
    /// f32 `(n_expert)`, or null: added to the probabilities for the selection, not for the weights.
    pub selection_bias: Ptr,
    /// How logits become probabilities.
    pub gating: Gating,
    /// Whether the weights of the selected experts are normalized to sum 1.
    pub norm: bool,
    /// Factor of the weights.
    pub scale: f32,
    /// Number of tokens.
    pub tokens: usize,
    /// Number of experts, at most [`MAX_EXPERTS`].
    pub n_expert: usize,
    /// Selected experts per token, 1 to `n_expert`.
    pub k: usize,
    /// Expert groups, if experts are selected from the best groups only.
    pub groups: Option<Groups>,
    /// i32 `(tokens, k)` and then f32 `(tokens, k)`, or null: copies of ids and weights for the records of the pass.
    pub log: Ptr,
}

impl Kernels {
    /// Whether [`Kernels::logits`] supports a matrix. It is faster than other products if there are few rows: then a warp per row
    /// cannot saturate the memory bandwidth.
    pub(super) fn is_router(weights: &Weights) -> bool {
        weights.ty == GgmlType::F32
            && weights.n_out <= MAX_EXPERTS
            && weights.n_in.is_multiple_of(4)
            && weights.row_size == 4 * weights.n_in
            && weights.n_in <= LOGITS_ELEMENTS * LOGITS_THREADS[1]
    }

    /// `out = weights · x + bias` for one row `x` of `(n_in)` elements. `bias`: `(n_out)` or null.
    pub(super) fn logits(
        &self,
        stream: &CudaStream,
        weights: &Weights,
        bias: Ptr,
        x: Ptr,
        out: Ptr,
    ) -> Result<()> {
        let [least, most] = LOGITS_THREADS;
        let threads = weights.n_in.div_ceil(LOGITS_ELEMENTS);
        let threads = threads.next_multiple_of(32).clamp(least, most);
        let args = args![weights.ptr, bias, x, weights.n_in, out];
        self.router
            .launch(stream, ROUTER_LOGITS, grid(weights.n_out, threads), &args)
    }

    /// Selects the experts of every token, best first; the lower index wins a tie. Experts outside the best groups are selected last, in
    /// the order of their indices. `ids`: i32 `(tokens, k)`, `weights`: f32
    /// `(tokens, k)`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if `n_expert`, `k` or the groups are out of range, or a driver error.
    pub fn route(&self, stream: &CudaStream, it: &Route, ids: Ptr, weights: Ptr) -> Result<()> {
        let kernel = match it.n_expert.div_ceil(32) {
            0..=1 => ROUTE_1,
            2 => ROUTE_2,
            3..=4 => ROUTE_4,
            5..=8 => ROUTE_8,
            9..=16 => ROUTE_16,
            _ => return Err(unsupported(format!("a layer with {} experts", it.n_expert))),
        };
        if it.k == 0 || it.k > it.n_expert {
            let (k, n) = (it.k, it.n_expert);
            return Err(unsupported(format!("selecting {k} of {n} experts")));
        }
        let groups = it.groups.unwrap_or(Groups { n: 0, n_used: 0 });
        if groups.n > 0 && !groups.divide(it.n_expert) {
            let (Groups { n, n_used }, n_expert) = (groups, it.n_expert);
            return Err(unsupported(format!(
                "{n_used} of {n} groups of {n_expert} experts"
            )));
        }
        let gating = match it.gating {
            Gating::Softmax => 0u32,
            Gating::Sigmoid => 1,
            Gating::SoftmaxOfSelected => 2,
            Gating::SigmoidOfSelected => 3,
        };
        let args = args![
            it.logits,
            it.selection_bias,
            gating,
            u32::from(it.norm),
            it.scale,
            it.tokens,
            it.n_expert,
            it.k,
            groups.n,
            groups.n_used,
            ids,
            weights,
            it.log,
        ];
        let grid = grid(it.tokens.div_ceil(TOKENS), TOKENS * 32);
        self.router.launch(stream, kernel, grid, &args)
    }
}

fn unsupported(what: String) -> Error {
    let kernel = "route";
    Error::Unsupported { kernel, what }
}
