//! `gpt-oss`: attention with sinks, a sliding window in every other layer, biases everywhere, softmax over the scores of
//! the chosen experts, clamped SwiGLU.

use crate::activation::NodeName;
use crate::arch::{Architecture, Cut, State};
use crate::cpu::attention::Shape;
use crate::error::Result;
use crate::hparams::HParams;
use crate::kv_cache::KvCache;
use crate::moe::{MoeLayer, MoeSpec};
use crate::ops::{AttentionSpec, Gating, Glu, Ops};
use crate::weights::{Loader, Matrix, Vector};

const MOE: MoeSpec = MoeSpec {
    gating: Gating::SoftmaxOfChosen,
    norm_weights: false,
    glu: Glu::SwigluOai,
    biases: true,
};

/// A matrix with a bias on its output.
struct Linear<'g> {
    weights: Matrix<'g>,
    bias: Vector,
}

struct Layer<'g> {
    /// `(n_embd)`
    attn_norm: Vector,
    /// `(n_embd, n_head * head_dim)`
    wq: Linear<'g>,
    /// `(n_embd, n_head_kv * head_dim)`
    wk: Linear<'g>,
    /// `(n_embd, n_head_kv * head_dim)`
    wv: Linear<'g>,
    /// `(n_head * head_dim, n_embd)`
    wo: Linear<'g>,
    /// `(n_head)`
    sinks: Vector,
    /// `(n_embd)`
    attn_post_norm: Vector,
    moe: MoeLayer<'g>,
}

struct GptOss<'g> {
    hp: HParams,
    layers: Vec<Layer<'g>>,
}

pub(crate) fn load<'g>(loader: &Loader<'g>, hp: &HParams) -> Result<Box<dyn Architecture + 'g>> {
    let (n_embd, d) = (hp.n_embd, hp.head_dim);
    let layer = |il: usize| -> Result<Layer<'g>> {
        let name = |part: &str, kind: &str| format!("blk.{il}.{part}.{kind}");
        let linear = |part: &str, n_in, n_out| -> Result<Linear<'g>> {
            let weights = loader.matrix(&name(part, "weight"), n_in, n_out)?;
            Ok(Linear {
                weights,
                bias: loader.vector(&name(part, "bias"), n_out)?,
            })
        };
        Ok(Layer {
            attn_norm: loader.vector(&name("attn_norm", "weight"), n_embd)?,
            wq: linear("attn_q", n_embd, hp.n_head * d)?,
            wk: linear("attn_k", n_embd, hp.n_head_kv * d)?,
            wv: linear("attn_v", n_embd, hp.n_head_kv * d)?,
            wo: linear("attn_output", hp.n_head * d, n_embd)?,
            sinks: loader.vector(&name("attn_sinks", "weight"), hp.n_head)?,
            attn_post_norm: loader.vector(&name("post_attention_norm", "weight"), n_embd)?,
            moe: MoeLayer::load(loader, hp, il, MOE)?,
        })
    };
    let layers = (0..hp.n_layer).map(layer).collect::<Result<_>>()?;
    Ok(Box::new(GptOss {
        hp: hp.clone(),
        layers,
    }))
}

impl Architecture for GptOss<'_> {
    fn cut(&self) -> Cut {
        Cut::BehindLastLayer
    }

    fn layer(&self, il: usize, ops: &mut Ops, s: &mut State, cache: &mut KvCache) {
        let (hp, l) = (&self.hp, &self.layers[il]);
        let name = |stem| NodeName::of(stem, il);
        let (eps, d) = (hp.rms_eps, hp.head_dim);

        ops.rms_norm(
            name("norm"),
            name("attn_norm"),
            &s.x,
            &l.attn_norm,
            eps,
            &mut s.normed,
        );
        ops.mul_mat(name("Qcur"), &l.wq.weights, &s.normed, &mut s.q);
        ops.add_bias(name("Qcur"), &l.wq.bias, &mut s.q);
        ops.rope(name("Qcur"), &hp.rope, d, &mut s.q);
        ops.mul_mat(name("Kcur"), &l.wk.weights, &s.normed, &mut s.k);
        ops.add_bias(name("Kcur"), &l.wk.bias, &mut s.k);
        ops.rope(name("Kcur"), &hp.rope, d, &mut s.k);
        ops.mul_mat(name("Vcur"), &l.wv.weights, &s.normed, &mut s.v);
        ops.add_bias(name("Vcur"), &l.wv.bias, &mut s.v);
        ops.store_kv(il, &s.k, &s.v, cache);

        let shape = Shape {
            n_head: hp.n_head,
            n_head_kv: hp.n_head_kv,
            head_dim: d,
            // Even layers see a window, odd ones everything.
            window: hp.n_swa.filter(|_| il.is_multiple_of(2)),
            scale: 1.0 / (d as f32).sqrt(),
        };
        let spec = AttentionSpec {
            shape,
            sinks: Some(&l.sinks),
        };
        ops.attention(name("kqv_out"), il, &spec, &s.q, cache, &mut s.heads);
        ops.mul_mat(name("kqv_wo"), &l.wo.weights, &s.heads, &mut s.block);
        ops.add_bias(name("attn_out"), &l.wo.bias, &mut s.block);
        ops.add(name("ffn_inp"), &s.block, &s.x, &mut s.ffn_inp);
        ops.rms_norm(
            name("norm"),
            name("attn_post_norm"),
            &s.ffn_inp,
            &l.attn_post_norm,
            eps,
            &mut s.normed,
        );
        l.moe.forward(ops, &mut s.moe, &s.normed, &mut s.block);
        ops.add(name("l_out"), &s.block, &s.ffn_inp, &mut s.x);
    }

    fn ops_per_layer(&self) -> (usize, usize) {
        let (pass, token) = MOE.ops(self.hp.n_expert_used);
        (19 + pass, token)
    }
}
