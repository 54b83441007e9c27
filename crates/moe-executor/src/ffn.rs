//! A gated feed-forward block for all tokens: the shared expert of a MoE layer, or the FFN of a dense layer.

use moe_gguf::LayerId;

use crate::activation::{Activation, NodeName};
use crate::buffers::Inventory;
use crate::error::Result;
use crate::ops::{Glu, Ops, SwigluLimit};
use crate::weights::{Loader, Matrix};

/// Weights of one block.
pub struct Ffn<'g> {
    il: LayerId,
    glu: Glu,
    /// Limit of the activation, if the block has one.
    limit: Option<SwigluLimit>,
    /// `(n_embd, n_ff)`
    gate: Matrix<'g>,
    /// `(n_embd, n_ff)`
    up: Matrix<'g>,
    /// `(n_ff, n_embd)`
    down: Matrix<'g>,
}

/// Operations of a block without a limit. Each writes one record per pass.
pub const FFN_OPS: usize = 4;

/// Additional operations of a SwiGLU with a limit.
pub const LIMIT_OPS: usize = 3;

/// Buffers of a block `(token, n_ff)`, shared by all layers.
pub struct FfnState {
    gate: Activation,
    up: Activation,
}

impl FfnState {
    /// Buffers whose ids start at `first_id`.
    pub fn new(first_id: u64) -> FfnState {
        FfnState {
            gate: Activation::new(first_id),
            up: Activation::new(first_id + 1),
        }
    }
}

impl FfnState {
    /// Adds its buffers to an inventory.
    pub(crate) fn buffers(&self, inventory: &mut Inventory) {
        inventory.activation("dense gate", &self.gate);
        inventory.activation("dense up", &self.up);
    }
}

impl<'g> Ffn<'g> {
    /// Loads the tensors `blk.IL.ffn_{gate,up,down}SUFFIX.weight`; `suffix` is `_shexp` for a shared expert.
    pub(crate) fn load(
        loader: &Loader<'g>,
        il: LayerId,
        suffix: &str,
        n_embd: usize,
        n_ff: usize,
    ) -> Result<Ffn<'g>> {
        let name = |part: &str| format!("blk.{il}.ffn_{part}{suffix}.weight");
        Ok(Ffn {
            il,
            glu: Glu::Swiglu,
            limit: None,
            gate: loader.matrix(&name("gate"), n_embd, n_ff)?,
            up: loader.matrix(&name("up"), n_embd, n_ff)?,
            down: loader.matrix(&name("down"), n_ff, n_embd)?,
        })
    }

    /// The same block with another activation.
    pub(crate) fn with_activation(self, glu: Glu) -> Ffn<'g> {
        Ffn { glu, ..self }
    }

    /// The same block with a limit of its SwiGLU.
    pub(crate) fn with_limit(self, limit: Option<f32>) -> Ffn<'g> {
        let il = self.il;
        let name = |stem| NodeName::of(stem, il);
        let limit = limit.map(|limit| SwigluLimit {
            limit,
            names: ["ffn_silu", "ffn_silu_clamped", "ffn_up_clamped"].map(name),
        });
        Ffn { limit, ..self }
    }

    /// Operations of the block. Each writes one record per pass.
    pub(crate) fn ops(&self) -> usize {
        FFN_OPS + self.limit.map_or(0, |_| LIMIT_OPS)
    }

    /// Bytes of its weights.
    pub(crate) fn size_bytes(&self) -> u64 {
        let matrices = [&self.gate, &self.up, &self.down];
        matrices.map(|matrix| matrix.place.size_bytes).iter().sum()
    }

    /// `out = down · glu(gate · x, up · x)` for every row of `x (token, n_embd)`.
    pub fn forward(
        &self,
        ops: &mut Ops,
        s: &mut FfnState,
        name: NodeName,
        x: &mut Activation,
        out: &mut Activation,
    ) {
        let activated = match self.glu {
            Glu::Swiglu => "ffn_swiglu",
            Glu::SwigluOai => "ffn_swiglu_oai",
            Glu::Reglu => "ffn_reglu",
            Glu::Geglu => "ffn_geglu",
        };
        let [gate, up, activated] =
            ["ffn_gate", "ffn_up", activated].map(|stem| NodeName::of(stem, self.il));
        ops.mul_mat(gate, &self.gate, x, &mut s.gate);
        match &self.limit {
            Some(limit) => {
                ops.limit_gate(limit, &mut s.gate);
                ops.mul_mat(up, &self.up, x, &mut s.up);
                ops.limit_up(limit, &mut s.up);
                let limited = NodeName::of("ffn_swiglu_limited", self.il);
                ops.multiply_gate(limited, &mut s.gate, &mut s.up);
            }
            None => {
                ops.mul_mat(up, &self.up, x, &mut s.up);
                ops.glu(activated, self.glu, &mut s.gate, &mut s.up);
            }
        }
        ops.mul_mat(name, &self.down, &mut s.gate, out);
    }
}
