//! The attention of a layer: norm, projections, RoPE, heads, output. [`AttentionSpec`] describes the differences between
//! architectures.

mod latent;
mod spec;

use moe_gguf::LayerId;

use crate::activation::{Activation, NodeName};
use crate::buffers::Inventory;
use crate::cpu::attention::Shape;
use crate::device_id::DeviceId;
use crate::error::Result;
use crate::hparams::{HParams, Rope};
use crate::kv_cache::KvCache;
use crate::norm::Norm;
use crate::ops::{At, Ops};
use crate::weights::{Bias, Linear, Loader, Vector};

use latent::{Latent, LatentState};
pub use latent::{LatentSpec, Temperature};
pub use spec::{AttentionSpec, Gate, GatedQueries, QkNames, QkNorm, RopeLayers};

/// Weights of the attention of one layer.
pub struct AttentionLayer<'g> {
    il: LayerId,
    spec: AttentionSpec,
    shape: Shape,
    /// Whether keys are computed before values: llama.cpp's graph does so in architectures with a sliding window.
    keys_first: bool,
    /// `None` in a layer without RoPE.
    rope: Option<Rope>,
    rope_factors: RopeFactors,
    /// `(n_embd)`
    norm: Norm,
    inputs: Projections<'g>,
    /// Norms of queries and keys, `(head_dim)` or `(n * head_dim)`.
    qk_norms: Option<[Norm; 2]>,
    /// `(n_head)`
    sinks: Option<Vector>,
    /// `(n_embd, n_head * head_dim)` or `(n_embd, n_head)`
    gate: Option<Linear<'g>>,
    /// `(n_head * head_dim, n_embd)`
    output: Linear<'g>,
}

/// Divisors of the RoPE frequencies `(n_dims / 2)`.
enum RopeFactors {
    /// For all contexts, if the file has them.
    All(Option<Vector>),
    /// For contexts up to the original context length, and for longer contexts.
    ByContext([Option<Vector>; 2]),
}

impl RopeFactors {
    fn load(loader: &Loader, hp: &HParams) -> Result<RopeFactors> {
        let vector = |name: &str| {
            let vector = loader
                .has(name)
                .then(|| loader.vector(name, hp.rope.n_dims / 2));
            vector.transpose()
        };
        if let Some(factors) = vector("rope_freqs.weight")? {
            return Ok(RopeFactors::All(Some(factors)));
        }
        let short = vector("rope_factors_short.weight")?;
        let long = vector("rope_factors_long.weight")?;
        Ok(RopeFactors::ByContext([short, long]))
    }

    /// The divisors for a context of `n_ctx` positions.
    fn of(&self, n_ctx: usize, rope: &Rope) -> Option<&Vector> {
        match self {
            RopeFactors::All(factors) => factors.as_ref(),
            RopeFactors::ByContext(factors) => {
                factors[usize::from(n_ctx > rope.n_ctx_orig)].as_ref()
            }
        }
    }
}

/// The matrices of queries, keys and values.
enum Projections<'g> {
    /// Queries, and their gates if they have any, `(n_embd, n_head * head_dim)`, keys and values `(n_embd, n_head_kv * head_dim)`.
    Separate(Box<[Linear<'g>; 3]>),
    /// All in one matrix, in this order.
    Fused(Box<Linear<'g>>),
    /// Products of compressed rows.
    Latent(Box<Latent<'g>>),
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
    /// Queries, keys and values of one matrix `(token, (n_head + 2 n_head_kv) * head_dim)`.
    fused: Activation,
    /// Gates of the heads `(token, n_head * head_dim)` or `(token, n_head)`.
    gates: Activation,
    /// Queries and gates of each head `(token, n_head * 2 head_dim)`.
    gated_queries: Activation,
    /// Buffers of latent attention.
    latent: LatentState,
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
            fused: buffer(6),
            gates: buffer(7),
            gated_queries: buffer(8),
            latent: LatentState::new(first_id + 128),
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
        inventory.activation("queries, keys and values", &self.fused);
        inventory.activation("attention gates", &self.gates);
        inventory.activation("queries and their gates", &self.gated_queries);
        self.latent.buffers(inventory);
    }
}

impl<'g> Projections<'g> {
    /// Loads the matrices of latent attention if `spec` has it, else `attn_qkv` if the file has it, otherwise `attn_q`, `attn_k` and
    /// `attn_v`.
    fn load(
        loader: &Loader<'g>,
        hp: &HParams,
        il: LayerId,
        spec: &AttentionSpec,
    ) -> Result<Projections<'g>> {
        if let Some(latent) = &spec.latent {
            let latent = Latent::load(loader, hp, il, latent)?;
            return Ok(Projections::Latent(Box::new(latent)));
        }
        let (n_embd, d) = (hp.n_embd, hp.head_dim);
        let n_q = hp.n_head * d * spec.per_query();
        let n_kv = hp.n_head_kv * d;
        let linear = |part: &str, n| {
            let name = format!("blk.{il}.attn_{part}");
            loader.linear(&name, [n_embd, n, 1], spec.qkv_bias)
        };
        if spec.clamp.is_some() || loader.has(&format!("blk.{il}.attn_qkv.weight")) {
            let fused = linear("qkv", n_q + 2 * n_kv)?;
            return Ok(Projections::Fused(Box::new(fused)));
        }
        let separate = [linear("q", n_q)?, linear("k", n_kv)?, linear("v", n_kv)?];
        Ok(Projections::Separate(Box::new(separate)))
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
        let window = hp
            .window
            .as_ref()
            .filter(|window| window.layers[il.index()]);
        let has_rope = spec.rope_layers.contain(il, window.is_some());
        let rope = has_rope.then(|| window.map_or(hp.rope, |window| window.rope));
        let rope_factors = if spec.rope_factors {
            RopeFactors::load(loader, hp)?
        } else {
            RopeFactors::All(None)
        };
        let qk_norm = |part: &str, n| {
            let is_row = spec.qk_norm == Some(QkNorm::Row);
            Norm::load(loader, hp, &name(part), if is_row { n } else { d }, false)
        };
        let qk_norms = spec.qk_norm.map(|_| {
            let q = qk_norm("attn_q_norm", n_q)?;
            Ok::<_, crate::Error>([q, qk_norm("attn_k_norm", n_kv)?])
        });
        let sinks = spec
            .sinks
            .then(|| loader.vector(&name("attn_sinks.weight"), hp.n_head));
        let gate = spec.gate.map(|gate| {
            let n = if gate.per_head { hp.n_head } else { n_q };
            loader.linear(&name("attn_gate"), [n_embd, n, 1], Bias::None)
        });
        let value_dim = spec.latent.map_or(hp.value_dim, |latent| latent.value_dim);
        let n_out = hp.n_head * value_dim;
        Ok(AttentionLayer {
            il,
            spec: *spec,
            shape: Shape {
                n_head: hp.n_head,
                n_head_kv: hp.n_head_kv,
                head_dim: d,
                value_dim: hp.value_dim,
                window: window.map(|window| window.n_positions),
                scale: spec.scale.unwrap_or(1.0 / (d as f32).sqrt()),
                softcap: spec.softcap,
            },
            keys_first: hp.window.is_some(),
            rope,
            rope_factors,
            norm: Norm::load(loader, hp, &name("attn_norm"), n_embd, hp.norm_bias)?,
            inputs: Projections::load(loader, hp, il, spec)?,
            qk_norms: qk_norms.transpose()?,
            sinks: sinks.transpose()?,
            gate: gate.transpose()?,
            output: loader.linear(&name("attn_output"), [n_out, n_embd, 1], spec.output_bias)?,
        })
    }

    /// Whether queries, keys and values are in one matrix.
    pub(crate) fn is_fused(&self) -> bool {
        matches!(self.inputs, Projections::Fused(_))
    }

    /// Whether all heads attend to compressed rows.
    fn is_absorbed(&self) -> bool {
        matches!(&self.inputs, Projections::Latent(latent) if latent.is_absorbed())
    }

    /// A part of the layer that has no GPU kernel.
    pub(crate) fn without_kernel(&self) -> Option<&'static str> {
        if self.spec.softcap.is_some() {
            return Some("bounded attention scores");
        }
        if self.spec.scales_queries {
            return Some("factors on the queries");
        }
        if self.spec.latent.is_some() {
            return Some("latent attention");
        }
        let fused = self
            .is_fused()
            .then_some("queries, keys and values in one matrix");
        let has_gate = self.gate.is_some() || self.spec.gated_queries.is_some();
        fused.or(has_gate.then_some("a gate of the attention"))
    }

    /// Operations of the layer. Each writes one record per pass.
    pub(crate) fn ops(&self) -> usize {
        let inputs = match &self.inputs {
            Projections::Separate(linears) => linears.iter().map(Linear::ops).sum(),
            Projections::Fused(linear) => linear.ops() + usize::from(self.spec.clamp.is_some()),
            Projections::Latent(latent) => latent.ops(),
        };
        let qk_norms = self.qk_norms.iter().flatten().map(Norm::ops);
        let norms = self.norm.ops() + qk_norms.sum::<usize>();
        let rope = if self.rope.is_some() { 2 } else { 0 };
        let gate = self.gate.as_ref().map_or(0, |gate| gate.ops() + 2);
        let gate = gate + self.spec.gated_queries.map_or(0, |_| 3);
        let store = if self.is_absorbed() { 1 } else { 2 };
        let heads = if self.spec.in_steps { 7 } else { 1 };
        let scale = usize::from(self.spec.scales_queries);
        norms + inputs + rope + scale + store + heads + gate + self.output.ops()
    }

    /// Computes the heads for each row of `x (token, n_embd)`. Stores keys and values in the cache.
    pub fn heads(
        &self,
        ops: &mut Ops,
        at: At,
        s: &mut AttentionState,
        x: &mut Activation,
        cache: &mut KvCache,
    ) {
        let name = |stem| NodeName::of(stem, self.il);
        let norm = ["norm", self.spec.norm].map(name);
        ops.norm(at.device, norm, x, &self.norm, &mut s.normed);
        if let Projections::Latent(latent) = &self.inputs {
            return latent.heads(ops, at, &self.shape, s, cache);
        }
        if let Projections::Fused(linear) = &self.inputs {
            ops.linear(
                ["wqkv", "wqkv_b"].map(name),
                linear,
                &mut s.normed,
                &mut s.fused,
            );
            if let Some(limit) = self.spec.clamp {
                ops.clamp(name("wqkv_clamped"), limit, &mut s.fused);
            }
        }
        let d = self.shape.head_dim;
        let n_q = self.shape.n_head * d * self.spec.per_query();
        let n_kv = self.shape.n_head_kv * d;
        let columns = [0..n_q, n_q..n_q + n_kv, n_q + n_kv..n_q + 2 * n_kv];
        let parts = if self.keys_first {
            [0, 1, 2]
        } else {
            [0, 2, 1]
        };
        for part in parts {
            let name = name(["Qcur", "Kcur", "Vcur"][part]);
            let dst = match part {
                0 => &mut s.q,
                1 => &mut s.k,
                _ => &mut s.v,
            };
            let is_normed = part < 2 && self.qk_norms.is_some();
            let target = if is_normed {
                &mut s.projected
            } else {
                &mut *dst
            };
            let gated = self.spec.gated_queries.filter(|_| part == 0);
            let (product, node) = match gated {
                Some(names) => (&mut s.gated_queries, NodeName::of(names.product, self.il)),
                None => (&mut *target, name),
            };
            match &self.inputs {
                Projections::Separate(linears) => {
                    ops.linear([node; 2], &linears[part], &mut s.normed, product);
                }
                Projections::Fused(_) | Projections::Latent(_) => {
                    // In ggml this is a view, whose memory belongs to the node of the product.
                    let fused = s.fused.name;
                    ops.columns(fused, columns[part].clone(), &mut s.fused, product);
                }
            }
            if gated.is_some() {
                ops.view_groups(node, 2 * d, 0..d, &mut s.gated_queries, target);
            }
            if part == 1 && self.spec.gated_queries.is_some() {
                target.name = name.reshaped(); // llama.cpp reshapes the keys to heads after their product
            }
            if part < 2 {
                let n_ctx = cache.capacity();
                self.rotate(ops, (at.device, n_ctx), part, &mut s.projected, dst);
            }
            if part == 0 && self.spec.scales_queries {
                ops.scale(name, 1.0 / (d as f32).sqrt(), dst);
            }
        }
        let in_steps = self.spec.in_steps;
        ops.store_kv(at, &mut s.k, Some(&mut s.v), in_steps, cache);
        let (sinks, q, heads) = (self.sinks.as_ref(), &mut s.q, &mut s.heads);
        if in_steps {
            ops.attention_in_steps(at, &self.shape, q, cache, heads);
        } else {
            ops.attention(at, &self.shape, sinks, q, cache, heads);
        }
    }

    /// `out = output product of the heads`, after [`AttentionLayer::heads`]; `out (token, n_embd)`.
    pub fn output(&self, ops: &mut Ops, s: &mut AttentionState, out: &mut Activation) {
        let name = |stem| NodeName::of(stem, self.il);
        if let (Some(linear), Some(gate)) = (&self.gate, self.spec.gate) {
            let [product, sigmoid, gated] = gate.names.map(name);
            ops.linear([product; 2], linear, &mut s.normed, &mut s.gates);
            ops.multiply_by_sigmoid([sigmoid, gated], &mut s.gates, &mut s.heads);
        }
        if let Some(names) = self.spec.gated_queries {
            let d = self.shape.head_dim;
            let gates = if names.names_view {
                (name(names.gates).copied(), "")
            } else {
                (name(names.gates), " (view)")
            };
            let (from, to, columns) = (&mut s.gated_queries, &mut s.gates, d..2 * d);
            ops.group_columns(gates, 2 * d, &[columns], from, to);
            ops.multiply_by_sigmoid(names.gated.map(name), &mut s.gates, &mut s.heads);
        }
        let names = match self.output.bias {
            Some(_) => ["kqv_wo", self.spec.output],
            None => [self.spec.output; 2],
        };
        let heads = if self.is_absorbed() {
            s.latent.output()
        } else {
            &mut s.heads
        };
        ops.linear(names.map(name), &self.output, heads, out);
    }

    /// Norm and RoPE of queries (`part` 0) or keys (`part` 1), of `projected` into `dst`; without a norm they are in `dst`.
    fn rotate(
        &self,
        ops: &mut Ops,
        (device, n_ctx): (DeviceId, usize),
        part: usize,
        projected: &mut Activation,
        dst: &mut Activation,
    ) {
        let name = |stem| NodeName::of(stem, self.il);
        let names = &self.spec.names;
        let rope = |ops: &mut Ops, x: &mut Activation| {
            if let Some(rope) = &self.rope {
                let (factors, d) = (self.rope_factors.of(n_ctx, rope), self.shape.head_dim);
                ops.rope(device, name(names.rotated[part]), rope, factors, d, x);
            }
        };
        let Some(norms) = &self.qk_norms else {
            return rope(ops, dst);
        };
        let normed = match self.rope {
            Some(_) => names.normed,
            None => names.not_rotated,
        };
        let normed = name(normed[part]);
        let nodes = [name("norm"), normed];
        if self.spec.qk_norm == Some(QkNorm::HeadAfterRope) {
            rope(ops, projected);
            ops.norm(device, nodes, projected, &norms[part], dst);
            return;
        }
        ops.norm(device, nodes, projected, &norms[part], dst);
        if self.spec.qk_norm == Some(QkNorm::Row) {
            dst.name = normed.reshaped(); // llama.cpp reshapes to heads after this norm
        }
        rope(ops, dst);
    }
}
