//! A feed-forward block for all tokens: the shared expert of a MoE layer, or the FFN of a dense layer.

use moe_gguf::LayerId;

use crate::activation::{Activation, NodeName};
use crate::buffers::Inventory;
use crate::error::Result;
use crate::ops::{Glu, Ops, SwigluLimit, Unary};
use crate::weights::{Loader, Matrix};

/// Weights of one block.
pub struct Ffn<'g> {
    il: LayerId,
    gate: Gate<'g>,
    /// Limit of a SwiGLU, if the block has one.
    limit: Option<SwigluLimit>,
    /// `(n_embd, n_ff)`
    up: Matrix<'g>,
    /// `(n_ff, n_embd)`
    down: Matrix<'g>,
}

/// The gate of a block, and the activation.
enum Gate<'g> {
    /// The activation of a gate `(n_embd, n_ff)`, multiplied by up.
    Glu(Glu, Box<Matrix<'g>>),
    /// The activation of up.
    None(Unary),
}

/// Operations of a block with a gate and without a limit. Each writes one record per pass.
pub const FFN_OPS: usize = 4;

/// Operations of a block without a gate. Each writes one record per pass.
pub const fn ungated_ffn_ops(unary: Unary) -> usize {
    2 + unary.ops()
}

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
        let name = format!("blk.{il}.ffn_gate{suffix}.weight");
        let matrix = loader.matrix(&name, n_embd, n_ff)?;
        let gate = Gate::Glu(Glu::Swiglu, Box::new(matrix));
        Ffn::with_gate(loader, il, suffix, [n_embd, n_ff], gate)
    }

    /// Loads a block without a gate: the tensors `blk.IL.ffn_{up,down}SUFFIX.weight`.
    pub(crate) fn load_ungated(
        loader: &Loader<'g>,
        il: LayerId,
        suffix: &str,
        widths: [usize; 2],
        unary: Unary,
    ) -> Result<Ffn<'g>> {
        Ffn::with_gate(loader, il, suffix, widths, Gate::None(unary))
    }

    fn with_gate(
        loader: &Loader<'g>,
        il: LayerId,
        suffix: &str,
        [n_embd, n_ff]: [usize; 2],
        gate: Gate<'g>,
    ) -> Result<Ffn<'g>> {
        let name = |part: &str| format!("blk.{il}.ffn_{part}{suffix}.weight");
        Ok(Ffn {
            il,
            gate,
            limit: None,
            up: loader.matrix(&name("up"), n_embd, n_ff)?,
            down: loader.matrix(&name("down"), n_ff, n_embd)?,
        })
    }

    /// The same block with another activation, if it has a gate.
    pub(crate) fn with_activation(self, glu: Glu) -> Ffn<'g> {
        let gate = match self.gate {
            Gate::Glu(_, matrix) => Gate::Glu(glu, matrix),
            ungated @ Gate::None(_) => ungated,
        };
        Ffn { gate, ..self }
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
        let ops = match &self.gate {
            Gate::Glu(..) => FFN_OPS,
            Gate::None(unary) => ungated_ffn_ops(*unary),
        };
        ops + self.limit_ops()
    }

    /// Additional operations because of the limit.
    pub(crate) fn limit_ops(&self) -> usize {
        self.limit.map_or(0, |_| LIMIT_OPS)
    }

    /// Bytes of its weights.
    pub(crate) fn size_bytes(&self) -> u64 {
        let gate = match &self.gate {
            Gate::Glu(_, matrix) => matrix.place.size_bytes,
            Gate::None(_) => 0,
        };
        gate + self.up.place.size_bytes + self.down.place.size_bytes
    }

    /// `out = down · glu(gate · x, up · x)`, or `down · activation(up · x)`, for every row of `x (token, n_embd)`.
    pub fn forward(
        &self,
        ops: &mut Ops,
        s: &mut FfnState,
        name: NodeName,
        x: &mut Activation,
        out: &mut Activation,
    ) {
        let node = |stem| NodeName::of(stem, self.il);
        let up = node("ffn_up");
        match &self.gate {
            Gate::Glu(glu, gate) => {
                let activated = match glu {
                    Glu::Swiglu => "ffn_swiglu",
                    Glu::SwigluOai => "ffn_swiglu_oai",
                    Glu::Reglu => "ffn_reglu",
                    Glu::Geglu => "ffn_geglu",
                    Glu::SwigluLimited(_) => "ffn_swiglu_limited",
                };
                ops.mul_mat(node("ffn_gate"), gate, x, &mut s.gate);
                if let Some(limit) = &self.limit {
                    ops.limit_gate(limit, &mut s.gate);
                    ops.mul_mat(up, &self.up, x, &mut s.up);
                    ops.limit_up(limit, &mut s.up);
                    let limited = node("ffn_swiglu_limited");
                    ops.multiply_gate(limited, &mut s.gate, &mut s.up);
                } else {
                    ops.mul_mat(up, &self.up, x, &mut s.up);
                    ops.glu(node(activated), *glu, &mut s.gate, &mut s.up);
                }
                ops.mul_mat(name, &self.down, &mut s.gate, out);
            }
            Gate::None(unary) => {
                let names = match unary {
                    Unary::SquaredRelu => ["ffn_relu", "ffn_sqr(relu)"],
                };
                ops.mul_mat(up, &self.up, x, &mut s.up);
                ops.unary(names.map(node), *unary, &mut s.up);
                ops.mul_mat(name, &self.down, &mut s.up, out);
            }
        }
    }
}
