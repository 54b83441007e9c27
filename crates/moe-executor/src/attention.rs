//! The attention of a layer: norm, projections, RoPE, heads, output. [`AttentionSpec`] describes the differences between
//! architectures.

mod latent;
mod spec;
mod state;

use moe_gguf::LayerId;

use crate::activation::{Activation, NodeName};
use crate::cpu::attention::Shape;
use crate::device_id::DeviceId;
use crate::error::Result;
use crate::hparams::{HParams, Rope, WindowKind};
use crate::kv_cache::KvCache;
use crate::norm::Norm;
use crate::ops::{At, Ops};
use crate::weights::{Bias, Linear, Loader, Vector};

use latent::Latent;
pub use latent::LatentSpec;
pub use spec::{AttentionSpec, Gate, GatedQueries, QkNames, QkNorm, RopeLayers, Temperature};
pub use state::AttentionState;

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
    /// Norms of queries and keys, `(head_dim)` or `(n * head_dim)`; `None` for keys that the layer does not compute.
    qk_norms: [Option<Norm>; 2],
    /// Norm of the values of a head.
    value_norm: Option<Norm>,
    /// The layer whose keys and values the heads read. If it is another layer, this one computes none.
    kv_layer: LayerId,
    /// `(n_head)`
    sinks: Option<Vector>,
    /// `(n_embd, n_head * head_dim)` or `(n_embd, n_head)`
    gate: Option<Linear<'g>>,
    /// `(n_head * value_dim, n_embd)`
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
    /// Loads `n` divisors.
    fn load(loader: &Loader, n: usize) -> Result<RopeFactors> {
        let vector = |name: &str| {
            let vector = loader.has(name).then(|| loader.vector(name, n));
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
    /// Queries, and their gates if they have any, `(n_embd, n_head * head_dim)`, keys `(n_embd, n_head_kv * head_dim)` and values
    /// `(n_embd, n_head_kv * value_dim)`. `None` for keys and values of another layer, and for values that are the keys.
    Separate(Box<[Option<Linear<'g>>; 3]>),
    /// All in one matrix, in this order.
    Fused(Box<Linear<'g>>),
    /// Products of compressed rows.
    Latent(Box<Latent<'g>>),
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
            let rotates = spec.rope_layers.contain(il, false);
            let latent = Latent::load(loader, hp, il, latent, rotates)?;
            return Ok(Projections::Latent(Box::new(latent)));
        }
        let heads = &hp.heads[il.index()];
        let n_q = heads.n_q() * spec.per_query();
        let linear = |part: &str, n| {
            let name = format!("blk.{il}.attn_{part}");
            loader.linear(&name, [hp.n_embd, n, 1], spec.qkv_bias)
        };
        let has = |part: &str| loader.has(&format!("blk.{il}.attn_{part}.weight"));
        if spec.clamp.is_some() || has("qkv") {
            let fused = linear("qkv", n_q + heads.n_k() + heads.n_v())?;
            return Ok(Projections::Fused(Box::new(fused)));
        }
        let q = linear("q", n_q)?;
        if heads.kv_layer != il {
            // llama.cpp accepts these tensors, and does not read them.
            for part in ["k", "v"] {
                loader.omit(&format!("blk.{il}.attn_{part}.weight"));
            }
            return Ok(Projections::Separate(Box::new([Some(q), None, None])));
        }
        let k = linear("k", heads.n_k())?;
        let has_v = !spec.values_from_keys || has("v");
        let v = has_v.then(|| linear("v", heads.n_v())).transpose()?;
        Ok(Projections::Separate(Box::new([Some(q), Some(k), v])))
    }

    /// Whether the values are the keys before norm and RoPE.
    fn has_values_from_keys(&self) -> bool {
        matches!(self, Projections::Separate(linears) if linears[1].is_some() && linears[2].is_none())
    }
}

impl<'g> AttentionLayer<'g> {
    pub(crate) fn load(
        loader: &Loader<'g>,
        hp: &HParams,
        il: LayerId,
        spec: &AttentionSpec,
    ) -> Result<AttentionLayer<'g>> {
        let heads = &hp.heads[il.index()];
        let (n_embd, d) = (hp.n_embd, heads.k_dim);
        let has_kv = heads.kv_layer == il;
        let name = |part: &str| format!("blk.{il}.{part}");
        let window = hp
            .window
            .as_ref()
            .filter(|window| window.layers[il.index()]);
        let has_rope = spec.rope_layers.contain(il, window.is_some());
        let rope = has_rope.then(|| window.map_or(hp.rope, |window| window.rope));
        let has_factors = spec.rope_factors && (spec.rope_factors_in_windows || window.is_none());
        let rope_factors = if has_factors {
            RopeFactors::load(loader, spec.rope_factor_dims.unwrap_or(hp.rope.n_dims) / 2)?
        } else {
            RopeFactors::All(None)
        };
        let qk_norm = |part: &str, n| -> Result<Option<Norm>> {
            let norm = match spec.qk_norm {
                None => return Ok(None),
                Some(QkNorm::Row) => Norm::load(loader, hp, &name(part), n, false)?,
                Some(QkNorm::PlainAfterRope) if rope.is_none() => return Ok(None),
                Some(QkNorm::PlainAfterRope) => Norm::plain(hp, d),
                Some(_) => Norm::load(loader, hp, &name(part), d, false)?,
            };
            Ok(Some(norm))
        };
        let q_norm = qk_norm("attn_q_norm", heads.n_q())?;
        let k_norm = if has_kv {
            qk_norm("attn_k_norm", heads.n_k())?
        } else {
            loader.omit(&name("attn_k_norm.weight"));
            None
        };
        let sinks = name("attn_sinks.weight");
        let has_sinks = spec.sinks && (!spec.optional_sinks || loader.has(&sinks));
        let sinks = has_sinks.then(|| loader.vector(&sinks, heads.n));
        let has_gate = |gate: &Gate| !gate.per_head || loader.has(&name("attn_gate.weight"));
        let gate = spec.gate.filter(has_gate).map(|gate| {
            let n = if gate.per_head {
                heads.n
            } else {
                heads.n_out()
            };
            loader.linear(&name("attn_gate"), [n_embd, n, 1], Bias::None)
        });
        let n_out = match spec.latent {
            Some(latent) => heads.n * latent.value_dim,
            None => heads.n_out(),
        };
        let of_kind = |kind: WindowKind| {
            let window = window.filter(|window| window.kind == kind);
            window.map(|window| window.n_positions)
        };
        Ok(AttentionLayer {
            il,
            spec: *spec,
            shape: Shape {
                n_head: heads.n,
                n_head_kv: heads.n_kv,
                head_dim: d,
                value_dim: heads.v_dim,
                window: of_kind(WindowKind::Sliding),
                chunk: of_kind(WindowKind::Chunked),
                scale: spec.scale.unwrap_or(1.0 / (d as f32).sqrt()),
                softcap: spec.softcap,
            },
            keys_first: hp.window.is_some(),
            rope,
            rope_factors,
            norm: Norm::load(loader, hp, &name("attn_norm"), n_embd, hp.norm_bias)?,
            inputs: Projections::load(loader, hp, il, spec)?,
            qk_norms: [q_norm, k_norm],
            value_norm: spec.value_norm.map(|_| Norm::plain(hp, heads.v_dim)),
            kv_layer: heads.kv_layer,
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

    /// Operations of the layer. Each writes one record per pass.
    pub(crate) fn ops(&self) -> usize {
        let n_parts = if self.has_kv() { 3 } else { 1 };
        let inputs = match &self.inputs {
            Projections::Separate(linears) => linears.iter().flatten().map(Linear::ops).sum(),
            Projections::Fused(linear) => {
                let copies = if self.spec.copies_columns { n_parts } else { 0 };
                linear.ops() + usize::from(self.spec.clamp.is_some()) + copies
            }
            Projections::Latent(latent) => latent.ops(),
        };
        let qk_norms = self.qk_norms.iter().flatten().map(Norm::ops);
        let value_norm = usize::from(self.value_norm.is_some() && self.has_kv());
        let norms = self.norm.ops() + qk_norms.sum::<usize>() + value_norm;
        let (rotated, store) = match (self.has_kv(), self.is_absorbed()) {
            (true, true) => (2, 1),
            (true, false) => (2, 2),
            (false, _) => (1, 0),
        };
        let rope = if self.rope.is_some() { rotated } else { 0 };
        let gate = self.gate.as_ref().map_or(0, |gate| gate.ops() + 2);
        let gate = gate + self.spec.gated_queries.map_or(0, |_| 3);
        let heads = if self.spec.in_steps { 7 } else { 1 };
        let scales = usize::from(self.spec.scales_queries)
            + usize::from(self.temperature().is_some())
            + usize::from(self.spec.output_scale.is_some());
        norms + inputs + rope + scales + store + heads + gate + self.output.ops()
    }

    /// The factors on the queries, if the layer has them.
    fn temperature(&self) -> Option<Temperature> {
        self.spec.temperature.filter(|_| self.rope.is_none())
    }

    /// Whether the layer computes keys and values.
    fn has_kv(&self) -> bool {
        self.kv_layer == self.il
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
        self.inputs(ops, at, s, x, cache);
        self.attend(ops, at, s, cache);
    }

    /// Computes the norm, queries, keys and values for each row of `x (token, n_embd)`. Stores keys and values in the cache.
    pub fn inputs(
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
            return latent.inputs(ops, at, s, cache);
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
        let parts: &[usize] = match (self.has_kv(), self.keys_first) {
            (true, true) => &[0, 1, 2],
            (true, false) => &[0, 2, 1],
            (false, _) => &[0],
        };
        for &part in parts {
            self.project(ops, (at.device, cache.capacity()), part, s);
        }
        if self.has_kv() {
            ops.store_kv(at, &mut s.k, Some(&mut s.v), self.spec.in_steps, cache);
        }
    }

    /// Computes the heads after [`AttentionLayer::inputs`].
    pub fn attend(&self, ops: &mut Ops, at: At, s: &mut AttentionState, cache: &mut KvCache) {
        if let Projections::Latent(latent) = &self.inputs {
            return latent.attend(ops, at, &self.shape, s, cache);
        }
        let (sinks, cache) = (self.sinks.as_ref(), (cache, self.kv_layer));
        let (q, heads) = (&mut s.q, &mut s.heads);
        if self.spec.in_steps {
            ops.attention_in_steps(at, &self.shape, q, cache, heads);
        } else {
            ops.attention(at, &self.shape, sinks, q, cache, heads);
        }
    }

    /// The product, norm and RoPE of queries (`part` 0), keys (1) or values (2) for a context of `n_ctx` positions.
    fn project(
        &self,
        ops: &mut Ops,
        (device, n_ctx): (DeviceId, usize),
        part: usize,
        s: &mut AttentionState,
    ) {
        let Shape {
            n_head,
            n_head_kv,
            head_dim,
            value_dim,
            ..
        } = self.shape;
        let stem = match part {
            0 => "Qcur",
            // The product has the last of its names in llama.cpp.
            1 if !self.inputs.has_values_from_keys() => "Kcur",
            _ => "Vcur",
        };
        let name = NodeName::of(stem, self.il);
        let dst = match part {
            0 => &mut s.q,
            1 => &mut s.k,
            _ => &mut s.v,
        };
        let is_normed = match part {
            2 => self.value_norm.is_some(),
            part => self.qk_norms[part].is_some(),
        };
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
                // Without a matrix of the values, `projected` still contains the product of the keys.
                if let Some(linear) = &linears[part] {
                    ops.linear([node; 2], linear, &mut s.normed, product);
                }
            }
            Projections::Fused(_) => {
                let n_q = n_head * head_dim * self.spec.per_query();
                let n_k = n_head_kv * head_dim;
                let ends = [0, n_q, n_q + n_k, n_q + n_k + n_head_kv * value_dim];
                let columns = ends[part]..ends[part + 1];
                if self.spec.copies_columns {
                    ops.copy_columns(node, columns, &mut s.fused, product);
                } else {
                    // In ggml this is a view, whose memory belongs to the node of the product.
                    let fused = s.fused.name;
                    ops.columns(fused, columns, &mut s.fused, product);
                }
            }
            Projections::Latent(_) => {}
        }
        if gated.is_some() {
            let queries = 0..head_dim;
            ops.view_groups(node, 2 * head_dim, queries, &mut s.gated_queries, target);
        }
        if self.spec.reshaped[part] {
            let is_view = self.is_fused() && !self.spec.copies_columns;
            target.name = if is_view {
                target.name.view()
            } else {
                name.reshaped()
            };
        }
        if part < 2 {
            self.rotate(ops, (device, n_ctx), part, &mut s.projected, dst);
        }
        if part == 0 && self.spec.scales_queries {
            ops.scale(name, 1.0 / (head_dim as f32).sqrt(), dst);
        }
        if let (0, Some(temperature)) = (part, self.temperature()) {
            let factor = |position| temperature.factor(position);
            ops.scale_rows(name, "inp_attn_scale", factor, dst);
        }
        if let (2, Some(norm), Some(stem)) = (part, &self.value_norm, self.spec.value_norm) {
            let normed = NodeName::of(stem, self.il);
            ops.norm(device, [normed; 2], &mut s.projected, norm, dst);
        }
    }

    /// `out = output product of the heads`, after [`AttentionLayer::heads`]; `out (token, n_embd)`.
    pub fn output(&self, ops: &mut Ops, s: &mut AttentionState, out: &mut Activation) {
        let name = |stem| NodeName::of(stem, self.il);
        if let (Some(linear), Some(gate)) = (&self.gate, self.spec.gate) {
            let [product, sigmoid, gated] = gate.names.map(name);
            ops.linear([product; 2], linear, &mut s.normed, &mut s.gates);
            if gate.per_head {
                s.heads.name = s.heads.name.reshaped(); // llama.cpp reshapes the output to heads
            }
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
        if let Some(factor) = self.spec.output_scale {
            ops.scale(name("attn_out_scaled"), factor, out);
        }
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
        let Some(norm) = &self.qk_norms[part] else {
            return rope(ops, dst);
        };
        let normed = match self.rope {
            Some(_) => names.normed,
            None => names.not_rotated,
        };
        let normed = name(normed[part]);
        let nodes = [name("norm"), normed];
        let after_rope = [QkNorm::HeadAfterRope, QkNorm::PlainAfterRope].map(Some);
        if after_rope.contains(&self.spec.qk_norm) {
            rope(ops, projected);
            ops.norm(device, nodes, projected, norm, dst);
            return;
        }
        ops.norm(device, nodes, projected, norm, dst);
        if self.spec.qk_norm == Some(QkNorm::Row) {
            dst.name = normed.reshaped(); // llama.cpp reshapes to heads after this norm
        }
        rope(ops, dst);
    }
}
