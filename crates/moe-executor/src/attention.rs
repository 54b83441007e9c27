//! The attention of a layer: norm, projections, RoPE, heads, output. [`AttentionSpec`] describes the differences between
//! architectures.

use moe_gguf::LayerId;

use crate::activation::{Activation, NodeName};
use crate::buffers::Inventory;
use crate::cpu::attention::Shape;
use crate::device_id::DeviceId;
use crate::error::Result;
use crate::hparams::{HParams, Rope};
use crate::kv_cache::KvCache;
use crate::ops::{At, Ops};
use crate::weights::{Linear, Loader, Vector};

/// Elements over which the RMS norm of queries and keys is computed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum QkNorm {
    /// The elements of one head.
    Head,
    /// The elements of all heads of a token.
    Row,
}

/// The attention of an architecture.
#[derive(Clone, Copy)]
pub struct AttentionSpec {
    /// Whether queries, keys and values have biases.
    pub qkv_bias: bool,
    /// Whether the output has a bias.
    pub output_bias: bool,
    /// RMS norm of queries and keys.
    pub qk_norm: Option<QkNorm>,
    /// Whether each head has an attention sink: a score in the softmax without a value.
    pub sinks: bool,
    /// Whether a file may contain `rope_freqs.weight`, divisors of the RoPE frequencies.
    pub rope_factors: bool,
}

impl AttentionSpec {
    /// Grouped-query attention without biases, norms of queries and keys, sinks, or frequency divisors.
    pub const PLAIN: AttentionSpec = AttentionSpec {
        qkv_bias: false,
        output_bias: false,
        qk_norm: None,
        sinks: false,
        rope_factors: false,
    };

    /// Operations of one layer. Each writes one record per pass.
    pub fn ops(&self) -> usize {
        let bias = usize::from(self.qkv_bias);
        let qk = 2 + bias + 2 * usize::from(self.qk_norm.is_some());
        let (norm, v, store, heads) = (2, 1 + bias, 2, 1);
        norm + 2 * qk + v + store + heads + 1 + usize::from(self.output_bias)
    }
}

/// Weights of the attention of one layer.
pub struct AttentionLayer<'g> {
    il: LayerId,
    eps: f32,
    shape: Shape,
    /// Whether keys are computed before values: llama.cpp's graph does so in architectures with a sliding window.
    keys_first: bool,
    rope: Rope,
    /// `(n_dims / 2)`
    rope_factors: Option<Vector>,
    /// `(n_embd)`
    norm: Vector,
    qk_norm: Option<QkNorm>,
    /// Queries.
    q: Rotated<'g>,
    /// Keys.
    k: Rotated<'g>,
    /// `(n_embd, n_head_kv * head_dim)`
    v: Linear<'g>,
    /// `(n_head)`
    sinks: Option<Vector>,
    /// `(n_head * head_dim, n_embd)`
    output: Linear<'g>,
}

/// Weights of the queries or the keys, which are normed and rotated. `n` is `n_head` or `n_head_kv`.
struct Rotated<'g> {
    /// `(n_embd, n * head_dim)`
    linear: Linear<'g>,
    /// `(head_dim)` or `(n * head_dim)`
    norm: Option<Vector>,
}

/// Buffers of the attention, shared by all layers.
pub struct AttentionState {
    /// Normed input `(token, n_embd)`.
    normed: Activation,
    /// Queries `(token, n_head * head_dim)`.
    q: Activation,
    /// Keys `(token, n_head_kv * head_dim)`.
    k: Activation,
    /// Values `(token, n_head_kv * head_dim)`.
    v: Activation,
    /// Queries or keys before their norm, same shapes.
    projected: Activation,
    /// Output of the heads `(token, n_head * head_dim)`.
    heads: Activation,
}

impl AttentionState {
    /// Buffers whose ids start at `first_id`.
    pub fn new(first_id: u64) -> AttentionState {
        let buffer = |i| Activation::new(first_id + i);
        AttentionState {
            normed: buffer(0),
            q: buffer(1),
            k: buffer(2),
            v: buffer(3),
            projected: buffer(4),
            heads: buffer(5),
        }
    }
}

impl AttentionState {
    /// Adds its buffers to an inventory.
    pub(crate) fn buffers(&self, inventory: &mut Inventory) {
        inventory.activation("attention input", &self.normed);
        inventory.activation("queries", &self.q);
        inventory.activation("keys", &self.k);
        inventory.activation("values", &self.v);
        inventory.activation("queries or keys before their norm", &self.projected);
        inventory.activation("attention heads", &self.heads);
    }
}

impl<'g> AttentionLayer<'g> {
    pub(crate) fn load(
        loader: &Loader<'g>,
        hp: &HParams,
        il: LayerId,
        spec: &AttentionSpec,
    ) -> Result<AttentionLayer<'g>> {
        let (n_embd, d) = (hp.n_embd, hp.head_dim);
        let (n_q, n_kv) = (hp.n_head * d, hp.n_head_kv * d);
        let name = |part: &str| format!("blk.{il}.{part}");
        let vector = |part: &str, n| loader.vector(&format!("blk.{il}.{part}.weight"), n);
        let input = |part: &str, n| loader.linear(&name(part), [n_embd, n, 1], spec.qkv_bias);
        let rotated = |part: &str, n| -> Result<Rotated<'g>> {
            let width = |norm| if norm == QkNorm::Head { d } else { n };
            let norm = spec
                .qk_norm
                .map(|norm| vector(&format!("{part}_norm"), width(norm)));
            Ok(Rotated {
                linear: input(part, n)?,
                norm: norm.transpose()?,
            })
        };
        let window = hp
            .window
            .as_ref()
            .filter(|window| window.layers[il.index()]);
        let rope_factors = (spec.rope_factors && loader.has(ROPE_FACTORS))
            .then(|| loader.vector(ROPE_FACTORS, hp.rope.n_dims / 2));
        Ok(AttentionLayer {
            il,
            eps: hp.rms_eps,
            shape: Shape {
                n_head: hp.n_head,
                n_head_kv: hp.n_head_kv,
                head_dim: d,
                window: window.map(|window| window.n_positions),
                scale: 1.0 / (d as f32).sqrt(),
            },
            keys_first: hp.window.is_some(),
            rope: window.map_or(hp.rope, |window| window.rope),
            rope_factors: rope_factors.transpose()?,
            norm: vector("attn_norm", n_embd)?,
            qk_norm: spec.qk_norm,
            q: rotated("attn_q", n_q)?,
            k: rotated("attn_k", n_kv)?,
            v: input("attn_v", n_kv)?,
            sinks: spec
                .sinks
                .then(|| vector("attn_sinks", hp.n_head))
                .transpose()?,
            output: loader.linear(&name("attn_output"), [n_q, n_embd, 1], spec.output_bias)?,
        })
    }

    /// `out = attention(norm(x))` for each row of `x (token, n_embd)`. Stores keys and values in the cache.
    pub fn forward(
        &self,
        ops: &mut Ops,
        at: At,
        s: &mut AttentionState,
        x: &mut Activation,
        cache: &mut KvCache,
        out: &mut Activation,
    ) {
        let il = self.il;
        let name = |stem| NodeName::of(stem, il);
        let norm = ["norm", "attn_norm"].map(name);
        let device = at.device;
        ops.rms_norm(device, norm, x, &self.norm, self.eps, &mut s.normed);
        let queries = ["Qcur", "Qcur_normed"].map(name);
        let keys = ["Kcur", "Kcur_normed"].map(name);
        let values = ["Vcur"; 2].map(name);
        let normed = (&mut s.normed, &mut s.projected);
        self.rotated(ops, device, queries, &self.q, normed, &mut s.q);
        if !self.keys_first {
            ops.linear(values, &self.v, &mut s.normed, &mut s.v);
        }
        let normed = (&mut s.normed, &mut s.projected);
        self.rotated(ops, device, keys, &self.k, normed, &mut s.k);
        if self.keys_first {
            ops.linear(values, &self.v, &mut s.normed, &mut s.v);
        }
        ops.store_kv(at, &mut s.k, &mut s.v, cache);
        ops.attention(
            at,
            &self.shape,
            self.sinks.as_ref(),
            &mut s.q,
            cache,
            &mut s.heads,
        );
        let names = match self.output.bias {
            Some(_) => ["kqv_wo", "attn_out"],
            None => ["attn_out"; 2],
        };
        ops.linear(names.map(name), &self.output, &mut s.heads, out);
    }

    /// Computes queries or keys: product, norm if the architecture has one, RoPE.
    fn rotated(
        &self,
        ops: &mut Ops,
        device: DeviceId,
        [name, normed]: [NodeName; 2],
        weights: &Rotated,
        (src, scratch): (&mut Activation, &mut Activation),
        dst: &mut Activation,
    ) {
        match &weights.norm {
            Some(norm) => {
                ops.linear([name; 2], &weights.linear, src, scratch);
                let names = [NodeName::of("norm", self.il), normed];
                ops.rms_norm(device, names, scratch, norm, self.eps, dst);
                if self.qk_norm == Some(QkNorm::Row) {
                    dst.name = normed.reshaped(); // llama.cpp reshapes to heads after this norm
                }
            }
            None => ops.linear([name; 2], &weights.linear, src, dst),
        }
        let (factors, d) = (self.rope_factors.as_ref(), self.shape.head_dim);
        ops.rope(device, name, &self.rope, factors, d, dst);
    }
}

const ROPE_FACTORS: &str = "rope_freqs.weight";
