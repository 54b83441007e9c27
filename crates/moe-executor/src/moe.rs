//! The MoE layer: router, worklist, experts, merge. What differs between architectures is data.

use crate::activation::{Activation, NodeName};
use crate::error::Result;
use crate::hparams::HParams;
use crate::ops::{Gating, Glu, Ops, RouterSpec};
use crate::recorder::Routing;
use crate::weights::{Loader, Matrix, Vector};

/// How a MoE layer of an architecture works.
#[derive(Clone, Copy)]
pub struct MoeSpec {
    /// How router scores become probabilities.
    pub gating: Gating,
    /// Whether the weights of the chosen experts are made to sum to one.
    pub norm_weights: bool,
    /// Activation of an expert.
    pub glu: Glu,
    /// Whether router and experts have biases.
    pub biases: bool,
}

impl MoeSpec {
    /// Operations of one layer that leave one record a pass, and those that leave one for every token.
    pub fn ops(&self, n_expert_used: usize) -> (usize, usize) {
        let softmax = usize::from(self.gating == Gating::Softmax);
        let router = 1
            + usize::from(self.biases)
            + softmax
            + 2
            + (1 - softmax)
            + 3 * usize::from(self.norm_weights);
        let merge = 1 + (n_expert_used.max(2) - 1);
        (router + 1 + merge, if self.biases { 6 } else { 3 })
    }
}

/// Weights of one expert projection.
struct Projection<'g> {
    weights: Matrix<'g>,
    bias: Option<Vector>,
}

/// Weights of one MoE layer.
pub struct MoeLayer<'g> {
    il: usize,
    spec: MoeSpec,
    n_expert: usize,
    n_expert_used: usize,
    /// `(n_embd, n_expert)`
    router: Matrix<'g>,
    /// `(n_expert)`
    router_bias: Option<Vector>,
    /// `(n_embd, n_ff_exp, n_expert)`
    gate: Projection<'g>,
    /// `(n_embd, n_ff_exp, n_expert)`
    up: Projection<'g>,
    /// `(n_ff_exp, n_embd, n_expert)`
    down: Projection<'g>,
}

/// Buffers of a MoE layer, shared by all layers.
pub struct MoeState {
    scores: Activation,
    probs: Activation,
    gate: Activation,
    up: Activation,
    down: Activation,
    routing: Routing,
}

impl MoeState {
    /// Buffers whose ids start at `first_id`.
    pub fn new(first_id: u64) -> MoeState {
        let buffer = |i| Activation::new(first_id + i);
        MoeState {
            scores: buffer(0),
            probs: buffer(1),
            gate: buffer(2),
            up: buffer(3),
            down: buffer(4),
            routing: Routing::default(),
        }
    }
}

impl<'g> MoeLayer<'g> {
    pub(crate) fn load(
        loader: &Loader<'g>,
        hp: &HParams,
        il: usize,
        spec: MoeSpec,
    ) -> Result<MoeLayer<'g>> {
        let (n_embd, n_ff, n_expert) = (hp.n_embd, hp.n_ff_exp, hp.n_expert);
        let name = |part: &str, kind: &str| format!("blk.{il}.{part}.{kind}");
        let projection = |part: &str, n_in, n_out| -> Result<Projection<'g>> {
            let weights = loader.stack(&name(part, "weight"), n_in, n_out, n_expert)?;
            let bias = spec
                .biases
                .then(|| loader.vectors(&name(part, "bias"), n_out, n_expert))
                .transpose()?;
            Ok(Projection { weights, bias })
        };
        let router_bias = spec
            .biases
            .then(|| loader.vector(&name("ffn_gate_inp", "bias"), n_expert))
            .transpose()?;
        Ok(MoeLayer {
            il,
            spec,
            n_expert,
            n_expert_used: hp.n_expert_used,
            router: loader.matrix(&name("ffn_gate_inp", "weight"), n_embd, n_expert)?,
            router_bias,
            gate: projection("ffn_gate_exps", n_embd, n_ff)?,
            up: projection("ffn_up_exps", n_embd, n_ff)?,
            down: projection("ffn_down_exps", n_ff, n_embd)?,
        })
    }

    /// `out = Σ weight · expert(x)` over the chosen experts, for every row of `x (token, n_embd)`.
    pub fn forward(&self, ops: &mut Ops, s: &mut MoeState, x: &Activation, out: &mut Activation) {
        let il = self.il;
        let name = |stem| NodeName::of(stem, il);
        let router = RouterSpec {
            weights: &self.router,
            bias: self.router_bias.as_ref(),
            gating: self.spec.gating,
            norm_weights: self.spec.norm_weights,
            n_expert_used: self.n_expert_used,
        };
        let weights_name = ops.route(il, &router, x, &mut s.scores, &mut s.probs, &mut s.routing);
        ops.plan_experts(&s.routing, self.n_expert);

        let names = ["ffn_moe_gate", "ffn_moe_gate_biased"].map(name);
        self.project(ops, names, &self.gate, x, &s.routing, &mut s.gate);
        let names = ["ffn_moe_up", "ffn_moe_up_biased"].map(name);
        self.project(ops, names, &self.up, x, &s.routing, &mut s.up);
        let activated = match self.spec.glu {
            Glu::Swiglu => "ffn_moe_swiglu",
            Glu::SwigluOai => "ffn_moe_swiglu_oai",
        };
        ops.glu(name(activated), self.spec.glu, &mut s.gate, &s.up);
        let names = ["ffn_moe_down", "ffn_moe_down_biased"].map(name);
        self.project(ops, names, &self.down, &s.gate, &s.routing, &mut s.down);
        ops.merge_experts(il, weights_name, &s.routing, &mut s.down, out);
    }

    fn project(
        &self,
        ops: &mut Ops,
        [product, biased]: [NodeName; 2],
        projection: &Projection,
        src: &Activation,
        routing: &Routing,
        dst: &mut Activation,
    ) {
        ops.mul_mat_id(product, self.il, &projection.weights, src, routing, dst);
        if let Some(bias) = &projection.bias {
            ops.add_id(biased, self.il, bias, routing, dst);
        }
    }
}
