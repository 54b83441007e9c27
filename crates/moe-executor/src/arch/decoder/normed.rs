//! A dense block and experts with the same input, each with norms before and after it (Gemma 4). The router reads the same input after
//! another norm.

use moe_gguf::LayerId;

use super::state::State;
use crate::activation::NodeName;
use crate::error::Result;
use crate::ffn::{FFN_OPS, Ffn};
use crate::hparams::HParams;
use crate::moe::{MoeLayer, MoeSpec};
use crate::norm::Norm;
use crate::ops::{At, Ops};
use crate::weights::{Loader, Vector};

/// The weights of both blocks.
pub(super) struct Normed<'g> {
    dense: Ffn<'g>,
    pub(super) moe: MoeLayer<'g>,
    /// Norm of the input of the router, without weights.
    router_norm: Norm,
    /// Factors on the normed input of the router `(n_embd)`.
    router_scales: Vector,
    /// Norms of the inputs of the dense block and the experts `(n_embd)`.
    input_norms: [Norm; 2],
    /// Norms of the outputs of the dense block and the experts `(n_embd)`.
    post_norms: [Norm; 2],
}

impl<'g> Normed<'g> {
    pub(super) fn load(
        loader: &Loader<'g>,
        hp: &HParams,
        il: LayerId,
        spec: &MoeSpec,
    ) -> Result<Normed<'g>> {
        let name = |part: &str| format!("blk.{il}.{part}");
        let norm = |part: &str| Norm::load(loader, hp, &name(part), hp.n_embd, false);
        let dense = Ffn::load(loader, il, "", hp.n_embd, hp.n_ff_by_layer[il.index()])?;
        Ok(Normed {
            dense: dense.with_activation(spec.glu),
            moe: MoeLayer::load(loader, hp, il, spec)?,
            router_norm: Norm::plain(hp, hp.n_embd),
            router_scales: loader.vector(&name("ffn_gate_inp.scale"), hp.n_embd)?,
            input_norms: [norm("ffn_norm")?, norm("pre_ffw_norm_2")?],
            post_norms: [norm("post_ffw_norm_1")?, norm("post_ffw_norm_2")?],
        })
    }

    /// Operations of the blocks: the number of those that write one record per pass, and of those that write one per token.
    pub(super) fn ops(&self, hp: &HParams) -> (usize, usize) {
        let (moe, per_token) = self.moe.ops(hp);
        let norms = self.input_norms.iter().chain(&self.post_norms);
        let norms = norms.map(Norm::ops).sum::<usize>();
        let router = self.router_norm.ops() + 2;
        let sum = 1;
        (moe + router + norms + FFN_OPS + sum, per_token)
    }

    /// Computes the sum of both blocks for `s.ffn_inp` in `s.block`.
    pub(super) fn forward(&self, ops: &mut Ops, at: At, s: &mut State) {
        let device = at.device;
        let name = |stem| NodeName::of(stem, at.il);
        let named = |node| ["norm", node].map(name);
        let (src, dst) = (&mut s.ffn_inp, &mut s.normed);
        let routed = name("ffn_moe_inp_normed");
        ops.norm(device, [routed; 2], src, &self.router_norm, dst);
        let scale = 1.0 / (dst.width as f32).sqrt();
        ops.scale(name("ffn_moe_inp_scaled"), scale, dst);
        ops.multiply(name("ffn_moe_inp"), &self.router_scales, dst);
        self.moe.scores(ops, &mut s.moe, dst);
        let weights = self.moe.route(ops, &mut s.moe);

        let [before_dense, before_experts] = &self.input_norms;
        ops.norm(device, named("ffn_norm_2"), src, before_experts, dst);
        let io = [&mut s.normed, &mut s.block];
        self.moe
            .forward_selected(ops, device, &mut s.moe, weights, io);

        let (src, dst) = (&mut s.ffn_inp, &mut s.normed);
        ops.norm(device, named("ffn_norm_1"), src, before_dense, dst);
        let out = &mut s.experts;
        self.dense
            .forward(ops, &mut s.dense, name("ffn_out"), dst, out);

        let [after_dense, after_experts] = &self.post_norms;
        ops.norm(device, named("ffn_mlp"), out, after_dense, dst);
        let experts = &mut s.block;
        ops.norm(device, named("ffn_moe"), experts, after_experts, out);
        ops.add(device, name("ffn_moe_combined"), dst, out, experts);
    }
}
