//! Routed experts of another width than the residual stream: the projections to this width and back ("LatentMoE", NVIDIA
//! Nemotron 3 white paper, 2025).

use moe_gguf::LayerId;

use crate::activation::{Activation, NodeName};
use crate::buffers::Inventory;
use crate::error::Result;
use crate::ops::Ops;
use crate::weights::{Loader, Matrix};

/// The projections of a layer.
pub(super) struct Latent<'g> {
    il: LayerId,
    /// `(n_embd, n_latent)`
    down: Matrix<'g>,
    /// `(n_latent, n_embd)`
    up: Matrix<'g>,
}

/// Buffers `(token, n_latent)`.
pub(super) struct LatentState {
    /// Input of the experts.
    input: Activation,
    /// Weighted sum of the selected experts.
    sum: Activation,
}

impl LatentState {
    /// Buffers whose ids start at `first_id`.
    pub fn new(first_id: u64) -> LatentState {
        LatentState {
            input: Activation::new(first_id),
            sum: Activation::new(first_id + 1),
        }
    }

    /// Adds its buffers to an inventory.
    pub fn buffers(&self, inventory: &mut Inventory) {
        inventory.activation("latent expert input", &self.input);
        inventory.activation("latent sum of the selected experts", &self.sum);
    }

    /// Input and weighted sum of the experts.
    pub fn io(&mut self) -> (&mut Activation, &mut Activation) {
        (&mut self.input, &mut self.sum)
    }
}

impl<'g> Latent<'g> {
    /// Loads the tensors `blk.IL.ffn_latent_{down,up}.weight`.
    pub fn load(
        loader: &Loader<'g>,
        il: LayerId,
        n_embd: usize,
        n_latent: usize,
    ) -> Result<Latent<'g>> {
        let name = |part: &str| format!("blk.{il}.ffn_latent_{part}.weight");
        Ok(Latent {
            il,
            down: loader.matrix(&name("down"), n_embd, n_latent)?,
            up: loader.matrix(&name("up"), n_latent, n_embd)?,
        })
    }

    /// Computes the input of the experts from `x (token, n_embd)`.
    pub fn project(&self, ops: &mut Ops, x: &mut Activation, s: &mut LatentState) {
        let name = NodeName::of("ffn_latent_down", self.il);
        ops.mul_mat(name, &self.down, x, &mut s.input);
    }

    /// Computes `out (token, n_embd)` from the weighted sum of the experts.
    pub fn project_back(&self, ops: &mut Ops, s: &mut LatentState, out: &mut Activation) {
        let name = NodeName::of("ffn_latent_up", self.il);
        ops.mul_mat(name, &self.up, &mut s.sum, out);
    }
}
