//! Kimi Delta Attention (Kimi Team, "Kimi Linear", 2025): causal convolutions of queries, keys and values, the delta rule with a decay for
//! each element of a key, and a norm whose output is multiplied by the sigmoid of a gate.

use moe_gguf::LayerId;

use crate::activation::{Activation, NodeName};
use crate::buffers::Inventory;
use crate::cpu::delta_net::Heads;
use crate::error::Result;
use crate::hparams::{HParams, StateShape};
use crate::kv_cache::KvCache;
use crate::norm::Norm;
use crate::ops::{At, Ops};
use crate::weights::{Loader, Matrix, Vector};

/// Weights of a layer. `v_width` elements are those of all heads.
pub struct Kda<'g> {
    il: LayerId,
    heads: Heads,
    /// Added to the squared length of queries and keys.
    eps: f32,
    /// `(n_embd)`
    norm: Norm,
    inputs: Inputs<'g>,
    /// Kernels of queries, keys and values, for each channel `(n, v_width)` and the oldest input first.
    kernels: [Vector; 3],
    /// The decay of each element of a key: a product of a product `(n_embd, width)`, `(width, v_width)`.
    decay: [Matrix<'g>; 2],
    /// Added to the decay `(v_width)`.
    decay_bias: Vector,
    /// Factors on the decay, negative and the same for all elements of a head `(v_width)`.
    decay_factors: Vector,
    /// Learning rates `(n_embd, n_head)`.
    beta: Matrix<'g>,
    /// The gate of the output: a product of a product `(n_embd, width)`, `(width, v_width)`.
    gate: [Matrix<'g>; 2],
    /// `(width)`
    output_norm: Norm,
    /// `(v_width, n_embd)`
    output: Matrix<'g>,
}

/// The matrices of queries, keys and values.
enum Inputs<'g> {
    /// Each `(n_embd, v_width)`.
    Separate(Box<[Matrix<'g>; 3]>),
    /// In this order `(n_embd, 3 v_width)`.
    Joint(Box<Matrix<'g>>),
}

/// Buffers of the layers.
pub struct KdaState {
    /// Normed input `(token, n_embd)`.
    normed: Activation,
    /// Queries, keys and values of one matrix `(token, 3 v_width)`.
    joint: Activation,
    /// Queries, keys and values `(token, v_width)`.
    qkv: [Activation; 3],
    /// The same after the convolution `(token, 3 v_width)`.
    convolved: Activation,
    /// First products of the decay and of the gate `(token, width)`.
    compressed: Activation,
    /// Logarithms of the decay `(token, v_width)`.
    decay: Activation,
    /// Learning rates `(token, n_head)`.
    beta: Activation,
    /// Values that were read from the state `(token, v_width)`.
    read: Activation,
    /// The same after their norm.
    read_normed: Activation,
    /// Gates of the output `(token, v_width)`.
    gates: Activation,
}

/// Names of the buffers of a pass over `tokens` tokens, and their number of values.
pub(super) fn buffers(
    heads: Heads,
    n_embd: usize,
    tokens: u64,
    has_joint_inputs: bool,
) -> Vec<(&'static str, u64)> {
    let values = |width: usize| tokens.saturating_mul(width as u64);
    let (v, qkv) = (heads.v_width(), heads.qkv_width());
    let joint = if has_joint_inputs { qkv } else { 0 };
    vec![
        ("delta attention input", values(n_embd)),
        ("delta attention inputs of one matrix", values(joint)),
        ("delta attention queries", values(v)),
        ("delta attention keys", values(v)),
        ("delta attention values", values(v)),
        ("delta attention convolution", values(qkv)),
        ("delta attention first products", values(heads.width)),
        ("delta attention decays", values(v)),
        ("delta attention learning rates", values(heads.n_v)),
        ("delta attention output", values(v)),
        ("delta attention normed output", values(v)),
        ("delta attention gates", values(v)),
    ]
}

impl KdaState {
    /// Buffers whose ids start at `first_id`.
    pub fn new(first_id: u64) -> KdaState {
        let buffer = |i| Activation::new(first_id + i);
        KdaState {
            normed: buffer(0),
            joint: buffer(1),
            qkv: [2, 3, 4].map(buffer),
            convolved: buffer(5),
            compressed: buffer(6),
            decay: buffer(7),
            beta: buffer(8),
            read: buffer(9),
            read_normed: buffer(10),
            gates: buffer(11),
        }
    }

    /// Adds its buffers to an inventory.
    pub(crate) fn buffers(&self, inventory: &mut Inventory) {
        let [q, k, v] = &self.qkv;
        inventory.activation("delta attention input", &self.normed);
        inventory.activation("delta attention inputs of one matrix", &self.joint);
        inventory.activation("delta attention queries", q);
        inventory.activation("delta attention keys", k);
        inventory.activation("delta attention values", v);
        inventory.activation("delta attention convolution", &self.convolved);
        inventory.activation("delta attention first products", &self.compressed);
        inventory.activation("delta attention decays", &self.decay);
        inventory.activation("delta attention learning rates", &self.beta);
        inventory.activation("delta attention output", &self.read);
        inventory.activation("delta attention normed output", &self.read_normed);
        inventory.activation("delta attention gates", &self.gates);
    }
}

impl<'g> Kda<'g> {
    pub(crate) fn load(
        loader: &Loader<'g>,
        hp: &HParams,
        il: LayerId,
        shape: StateShape,
        heads: Heads,
    ) -> Result<Kda<'g>> {
        let (n_embd, d, v) = (hp.n_embd, heads.width, heads.v_width());
        let name = |part: &str| format!("blk.{il}.{part}");
        let matrix = |part: &str, n_in, n_out| {
            let name = name(&format!("{part}.weight"));
            loader.matrix(&name, n_in, n_out)
        };
        let inputs = if loader.has(&name("attn_qkv.weight")) {
            Inputs::Joint(Box::new(matrix("attn_qkv", n_embd, heads.qkv_width())?))
        } else {
            let part = |part: &str| matrix(part, n_embd, v);
            Inputs::Separate(Box::new([
                part("attn_q")?,
                part("attn_k")?,
                part("attn_v")?,
            ]))
        };
        // llama.cpp accepts these tensors, and does not read them.
        for part in ["attn_q", "attn_k", "attn_v", "attn_qkv"] {
            loader.omit(&name(&format!("{part}.bias")));
        }
        let kernel = |part: &str| {
            let name = name(&format!("ssm_conv1d_{part}.weight"));
            loader.kernel_planes(&name, shape.n_past + 1, v)
        };
        let mut factors = loader.vectors(&name("ssm_a"), 1, heads.n_v)?;
        let of_head = factors.data.iter().flat_map(|&x| std::iter::repeat_n(x, d));
        factors.data = of_head.collect();
        Ok(Kda {
            il,
            heads,
            eps: hp.norm_eps,
            norm: Norm::load(loader, hp, &name("attn_norm"), n_embd, hp.norm_bias)?,
            inputs,
            kernels: [kernel("q")?, kernel("k")?, kernel("v")?],
            decay: [matrix("ssm_f_a", n_embd, d)?, matrix("ssm_f_b", d, v)?],
            decay_bias: loader.vector(&name("ssm_dt.bias"), v)?,
            decay_factors: factors,
            beta: matrix("ssm_beta", n_embd, heads.n_v)?,
            gate: [matrix("ssm_g_a", n_embd, d)?, matrix("ssm_g_b", d, v)?],
            output_norm: Norm::load(loader, hp, &name("ssm_norm"), d, false)?,
            output: matrix("attn_output", v, n_embd)?,
        })
    }

    /// Whether queries, keys and values are in one matrix.
    pub(crate) fn has_joint_inputs(&self) -> bool {
        matches!(self.inputs, Inputs::Joint(_))
    }

    /// Operations of the layer. Each writes one record per pass.
    pub(crate) fn ops(&self) -> usize {
        let inputs = match self.inputs {
            Inputs::Separate(_) => 3,
            // The product, and copies of its parts.
            Inputs::Joint(_) => 4,
        };
        let norms = self.norm.ops() + self.output_norm.ops();
        // The convolutions with an activation; each rate with a function.
        let (convolutions, decay, beta, rule) = (4, 3, 2, 1);
        let (gate, output) = (4, 1);
        norms + inputs + convolutions + decay + beta + rule + gate + output
    }

    /// Computes the delta rule and the norm of its output for each row of `x (token, n_embd)`. Updates the states in the cache.
    pub fn read(
        &self,
        ops: &mut Ops,
        at: At,
        s: &mut KdaState,
        x: &mut Activation,
        cache: &mut KvCache,
    ) {
        let (il, heads) = (self.il, self.heads);
        let name = |stem| NodeName::of(stem, il);
        let norm = ["norm", "attn_norm"].map(name);
        ops.norm(at.device, norm, x, &self.norm, &mut s.normed);
        let names = ["kda_q", "kda_k", "kda_v"].map(name);
        match &self.inputs {
            Inputs::Separate(matrices) => {
                for ((name, matrix), out) in names.into_iter().zip(&**matrices).zip(&mut s.qkv) {
                    ops.mul_mat(name, matrix, &mut s.normed, out);
                }
            }
            Inputs::Joint(matrix) => {
                ops.mul_mat(name("kda_qkv"), matrix, &mut s.normed, &mut s.joint);
                let v = heads.v_width();
                for ((i, name), out) in names.into_iter().enumerate().zip(&mut s.qkv) {
                    ops.copy_columns(name, i * v..(i + 1) * v, &mut s.joint, out);
                }
            }
        }
        let (kernels, qkv) = (&self.kernels, s.qkv.each_mut());
        let convolved = (il, ["kda_conv", "kda_conv_silu"].map(name));
        ops.convolve_qkv(convolved, kernels, qkv, cache, &mut s.convolved);
        let [first, second] = &self.decay;
        ops.mul_mat(name("f_a"), first, &mut s.normed, &mut s.compressed);
        let (compressed, decay) = (&mut s.compressed, &mut s.decay);
        ops.mul_mat(name("g1 f_b(f_a(cur))"), second, compressed, decay);
        let (bias, factors) = (&self.decay_bias, &self.decay_factors);
        ops.decay(name("kda_g1"), bias, factors, decay);
        ops.mul_mat(name("kda_beta"), &self.beta, &mut s.normed, &mut s.beta);
        ops.sigmoid(name("kda_beta_sigmoid"), &mut s.beta);
        let inputs = [&mut s.convolved, &mut s.decay, &mut s.beta];
        let read = name("attn_output");
        ops.delta_net(il, read, (heads, self.eps), inputs, cache, &mut s.read);
        let norm = ["norm", "kda_normed"].map(name);
        let (read, normed) = (&mut s.read, &mut s.read_normed);
        ops.norm(at.device, norm, read, &self.output_norm, normed);
    }

    /// `out = output product of the gated values`, after [`Kda::read`]; `out (token, n_embd)`.
    pub fn output(&self, ops: &mut Ops, s: &mut KdaState, out: &mut Activation) {
        let name = |stem| NodeName::of(stem, self.il);
        let [first, second] = &self.gate;
        ops.mul_mat(name("g_a"), first, &mut s.normed, &mut s.compressed);
        let (compressed, gates) = (&mut s.compressed, &mut s.gates);
        ops.mul_mat(name("g2 g_b(g_a(cur_2d))"), second, compressed, gates);
        let names = ["kda_gate", "kda_gated"].map(name);
        ops.multiply_by_sigmoid(names, gates, &mut s.read_normed);
        ops.mul_mat(name("kda_out"), &self.output, &mut s.read_normed, out);
    }
}
