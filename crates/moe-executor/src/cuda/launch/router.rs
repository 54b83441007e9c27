//! The router of a MoE layer.

use cudarc::driver::CudaStream;

use super::{Kernels, grid};
use crate::cuda::kernel::kernels;
use crate::cuda::module::args;
use crate::cuda::{Error, Ptr, Result};
use crate::ops::Gating;

kernels! {
    ROUTE_1 = "route_1",
    ROUTE_2 = "route_2",
    ROUTE_4 = "route_4",
    ROUTE_8 = "route_8",
    ROUTE_16 = "route_16" => (
        logits: Ptr, selection_bias: Ptr, gating: U32, norm: U32, scale: F32, tokens: U32, n_expert: U32, k: U32,
        ids: Ptr, weights: Ptr,
    );
}

/// Largest number of experts that a warp holds in its registers.
pub const MAX_EXPERTS: usize = 512;
/// Tokens of a block, as in the kernel.
const TOKENS: usize = 4;

/// What a router does.
pub struct Route {
    /// Scores `(tokens, n_expert)`.
    pub logits: Ptr,
    /// Added to the probabilities for the choice, not for the weights `(n_expert)`; or none.
    pub selection_bias: Ptr,
    /// How scores become probabilities.
    pub gating: Gating,
    /// Whether the weights of the chosen are made to sum to one.
    pub norm: bool,
    /// Factor on the weights.
    pub scale: f32,
    /// Rows.
    pub tokens: usize,
    /// Experts of the layer, up to [`MAX_EXPERTS`].
    pub n_expert: usize,
    /// Experts of a token, 1 to `n_expert`.
    pub k: usize,
}

impl Kernels {
    /// Chooses experts for every row, best first, ties to the lower index: `ids (tokens, k)` i32 and `weights (tokens, k)` f32.
    ///
    /// # Errors
    /// More experts than the kernel holds.
    pub fn route(&self, stream: &CudaStream, it: &Route, ids: Ptr, weights: Ptr) -> Result<()> {
        let kernel = match it.n_expert.div_ceil(32) {
            0..=1 => ROUTE_1,
            2 => ROUTE_2,
            3..=4 => ROUTE_4,
            5..=8 => ROUTE_8,
            9..=16 => ROUTE_16,
            _ => return Err(unsupported(format!("a layer of {} experts", it.n_expert))),
        };
        if it.k == 0 || it.k > it.n_expert {
            let (k, n) = (it.k, it.n_expert);
            return Err(unsupported(format!("a choice of {k} of {n} experts")));
        }
        let gating = match it.gating {
            Gating::Softmax => 0u32,
            Gating::Sigmoid => 1,
            Gating::SoftmaxOfChosen => 2,
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
            ids,
            weights,
        ];
        let grid = grid(it.tokens.div_ceil(TOKENS), TOKENS * 32);
        self.router.launch(stream, kernel, grid, &args)
    }
}

fn unsupported(what: String) -> Error {
    let kernel = "route";
    Error::Unsupported { kernel, what }
}
