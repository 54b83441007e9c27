//! `qwen3moe`: grouped-query attention with normed queries and keys, softmax router with normalised weights.

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
    gating: Gating::Softmax,
    norm_weights: true,
    glu: Glu::Swiglu,
    biases: false,
};

struct Layer<'g> {
    /// `(n_embd)`
    attn_norm: Vector,
    /// `(n_embd, n_head * head_dim)`
    wq: Matrix<'g>,
    /// `(n_embd, n_head_kv * head_dim)`
    wk: Matrix<'g>,
    /// `(n_embd, n_head_kv * head_dim)`
    wv: Matrix<'g>,
    /// `(head_dim)`
    q_norm: Vector,
    /// `(head_dim)`
    k_norm: Vector,
    /// `(n_head * head_dim, n_embd)`
    wo: Matrix<'g>,
    /// `(n_embd)`
    ffn_norm: Vector,
    moe: MoeLayer<'g>,
}

struct Qwen3Moe<'g> {
    hp: HParams,
    layers: Vec<Layer<'g>>,
}

pub(crate) fn load<'g>(loader: &Loader<'g>, hp: &HParams) -> Result<Box<dyn Architecture + 'g>> {
    let (n_embd, d) = (hp.n_embd, hp.head_dim);
    let layer = |il: usize| -> Result<Layer<'g>> {
        let name = |part: &str| format!("blk.{il}.{part}.weight");
        Ok(Layer {
            attn_norm: loader.vector(&name("attn_norm"), n_embd)?,
            wq: loader.matrix(&name("attn_q"), n_embd, hp.n_head * d)?,
            wk: loader.matrix(&name("attn_k"), n_embd, hp.n_head_kv * d)?,
            wv: loader.matrix(&name("attn_v"), n_embd, hp.n_head_kv * d)?,
            q_norm: loader.vector(&name("attn_q_norm"), d)?,
            k_norm: loader.vector(&name("attn_k_norm"), d)?,
            wo: loader.matrix(&name("attn_output"), hp.n_head * d, n_embd)?,
            ffn_norm: loader.vector(&name("ffn_norm"), n_embd)?,
            moe: MoeLayer::load(loader, hp, il, MOE)?,
        })
    };
    let layers = (0..hp.n_layer).map(layer).collect::<Result<_>>()?;
    Ok(Box::new(Qwen3Moe {
        hp: hp.clone(),
        layers,
    }))
}

impl Architecture for Qwen3Moe<'_> {
    fn cut(&self) -> Cut {
        Cut::InLastLayer
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
        ops.mul_mat(name("Qcur"), &l.wq, &s.normed, &mut s.q);
        ops.rms_norm(
            name("norm"),
            name("Qcur_normed"),
            &s.q,
            &l.q_norm,
            eps,
            &mut s.qk_normed,
        );
        std::mem::swap(&mut s.q, &mut s.qk_normed);
        ops.rope(name("Qcur"), &hp.rope, d, &mut s.q);
        ops.mul_mat(name("Vcur"), &l.wv, &s.normed, &mut s.v);
        ops.mul_mat(name("Kcur"), &l.wk, &s.normed, &mut s.k);
        ops.rms_norm(
            name("norm"),
            name("Kcur_normed"),
            &s.k,
            &l.k_norm,
            eps,
            &mut s.qk_normed,
        );
        std::mem::swap(&mut s.k, &mut s.qk_normed);
        ops.rope(name("Kcur"), &hp.rope, d, &mut s.k);
        ops.store_kv(il, &s.k, &s.v, cache);

        let shape = Shape {
            n_head: hp.n_head,
            n_head_kv: hp.n_head_kv,
            head_dim: d,
            window: None,
            scale: 1.0 / (d as f32).sqrt(),
        };
        ops.attention(
            name("kqv_out"),
            il,
            &AttentionSpec { shape, sinks: None },
            &s.q,
            cache,
            &mut s.heads,
        );
        ops.mul_mat(name("attn_out"), &l.wo, &s.heads, &mut s.block);
        if il + 1 == hp.n_layer {
            s.cut_rows(il, ops);
            if s.wanted.is_empty() {
                return;
            }
        }
        ops.add(name("ffn_inp"), &s.block, &s.x, &mut s.ffn_inp);
        ops.rms_norm(
            name("norm"),
            name("ffn_norm"),
            &s.ffn_inp,
            &l.ffn_norm,
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
