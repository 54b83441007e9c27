//! The router of a MoE layer.

use cudarc::driver::CudaStream;

use super::{Kernels, grid};
use crate::cuda::kernel::kernels;
use crate::cuda::module::args;
use crate::cuda::{Error, Ptr, Result};
use crate::hparams::{Gating, Groups};

kernels! {
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
