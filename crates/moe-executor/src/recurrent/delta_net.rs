//! The gated delta net of Qwen3-Next and Qwen3.5: a causal convolution of queries, keys and values, the gated delta rule, and a norm whose
//! output is multiplied by a gate.

use moe_gguf::LayerId;

use crate::activation::{Activation, NodeName};
use crate::buffers::Inventory;
use crate::cpu::delta_net::Heads;
use crate::error::Result;
use crate::hparams::{HParams, StateShape};
use crate::kv_cache::KvCache;
use crate::norm::Norm;
use crate::ops::{At, Convolution, Glu, Ops};
use crate::weights::{Loader, Matrix, Vector};

/// The gated delta nets of an architecture.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeltaNetSpec {
    /// Heads.
    pub heads: Heads,
    /// Whether a file may have queries, keys, values and gates in one matrix (`ssm_in`), for each head of keys in turn.
    pub joint_inputs: bool,
    /// Whether the rates are in one matrix (`ssm_ba`), for each head of keys in turn, instead of `ssm_beta` and `ssm_alpha`.
    pub joint_rates: bool,
}

/// Weights of a layer.
pub struct DeltaNet<'g> {
    il: LayerId,
    heads: Heads,
    /// Added to the squared length of queries and keys.
    eps: f32,
    /// `(n_embd)`
    norm: Norm,
    inputs: Inputs<'g>,
    rates: Rates<'g>,
    /// Kernel of each channel `(n, qkv_width)`, for the oldest input first.
    kernel: Vector,
    /// Added to the rates of the decay `(n_v)`.
    decay_bias: Vector,
    /// Factors on the decay `(n_v)`, negative.
    decay_factors: Vector,
    /// `(width)`
    output_norm: Norm,
    /// `(v_width, n_embd)`
    output: Matrix<'g>,
}

/// The matrices of queries, keys, values and output gates.
enum Inputs<'g> {
    /// Queries, keys and values `(n_embd, qkv_width)`, gates `(n_embd, v_width)`.
    Separate(Box<[Matrix<'g>; 2]>),
    /// For each head of keys: its query, key, values and gates `(n_embd, qkv_width + v_width)`.
    Joint(Box<Matrix<'g>>),
}

/// The matrices of the learning rates and of the decay.
enum Rates<'g> {
    /// Learning rates, decays `(n_embd, n_v)`.
    Separate(Box<[Matrix<'g>; 2]>),
    /// For each head of keys: the learning rates and decays of its heads of values `(n_embd, 2 n_v)`.
    Joint(Box<Matrix<'g>>),
}

/// Buffers of the layers.
pub struct DeltaNetState {
    /// Normed input `(token, n_embd)`.
    normed: Activation,
    /// Queries, keys, values and gates of one matrix `(token, qkv_width + v_width)`.
    joint: Activation,
    /// Queries, keys and values `(token, qkv_width)`.
    qkv: Activation,
    /// The same after the convolution.
    convolved: Activation,
    /// Rates of one matrix `(token, 2 n_v)`.
    joint_rates: Activation,
    /// Learning rates `(token, n_v)`.
    beta: Activation,
    /// Logarithms of the decay `(token, n_v)`.
    decay: Activation,
    /// Values that were read from the state `(token, v_width)`.
    read: Activation,
    /// The same after their norm.
    read_normed: Activation,
    /// Gates of the output `(token, v_width)`.
    gates: Activation,
}

/// Names of the buffers of a pass over `tokens` tokens, and their number of values.
pub(super) fn buffers(
    spec: DeltaNetSpec,
    n_embd: usize,
    tokens: u64,
    has_joint_inputs: bool,
) -> Vec<(&'static str, u64)> {
    let heads = spec.heads;
    let values = |width: usize| tokens * width as u64;
    let (qkv, v, n_v) = (heads.qkv_width(), heads.v_width(), heads.n_v);
    let joint = if has_joint_inputs { qkv + v } else { 0 };
    let joint_rates = if spec.joint_rates { 2 * n_v } else { 0 };
    vec![
        ("delta net input", values(n_embd)),
        ("delta net inputs of one matrix", values(joint)),
        ("delta net queries, keys and values", values(qkv)),
        ("delta net convolution", values(qkv)),
        ("delta net rates of one matrix", values(joint_rates)),
        ("delta net learning rates", values(n_v)),
        ("delta net decays", values(n_v)),
        ("delta net output", values(v)),
        ("delta net normed output", values(v)),
        ("delta net gates", values(v)),
    ]
}

impl DeltaNetState {
    /// Buffers whose ids start at `first_id`.
    pub fn new(first_id: u64) -> DeltaNetState {
        let buffer = |i| Activation::new(first_id + i);
        DeltaNetState {
            normed: buffer(0),
            joint: buffer(1),
            qkv: buffer(2),
            convolved: buffer(3),
            joint_rates: buffer(4),
            beta: buffer(5),
            decay: buffer(6),
            read: buffer(7),
            read_normed: buffer(8),
            gates: buffer(9),
        }
    }

    /// Adds its buffers to an inventory.
    pub(crate) fn buffers(&self, inventory: &mut Inventory) {
        inventory.activation("delta net input", &self.normed);
        inventory.activation("delta net inputs of one matrix", &self.joint);
        inventory.activation("delta net queries, keys and values", &self.qkv);
        inventory.activation("delta net convolution", &self.convolved);
        inventory.activation("delta net rates of one matrix", &self.joint_rates);
        inventory.activation("delta net learning rates", &self.beta);
        inventory.activation("delta net decays", &self.decay);
        inventory.activation("delta net output", &self.read);
        inventory.activation("delta net normed output", &self.read_normed);
        inventory.activation("delta net gates", &self.gates);
    }
}

impl<'g> DeltaNet<'g> {
    pub(crate) fn load(
        loader: &Loader<'g>,
        hp: &HParams,
        il: LayerId,
        shape: StateShape,
        spec: DeltaNetSpec,
    ) -> Result<DeltaNet<'g>> {
        let (n_embd, heads) = (hp.n_embd, spec.heads);
        let (qkv, v, n_v) = (heads.qkv_width(), heads.v_width(), heads.n_v);
        let name = |part: &str| format!("blk.{il}.{part}");
        let matrix = |part: &str, n_out| loader.matrix(&name(part), n_embd, n_out);
        let inputs = if spec.joint_inputs && !loader.has(&name("attn_qkv.weight")) {
            Inputs::Joint(Box::new(matrix("ssm_in.weight", qkv + v)?))
        } else {
            let qkv = matrix("attn_qkv.weight", qkv)?;
            Inputs::Separate(Box::new([qkv, matrix("attn_gate.weight", v)?]))
        };
        let rates = if spec.joint_rates {
            Rates::Joint(Box::new(matrix("ssm_ba.weight", 2 * n_v)?))
        } else {
            let beta = matrix("ssm_beta.weight", n_v)?;
            Rates::Separate(Box::new([beta, matrix("ssm_alpha.weight", n_v)?]))
        };
        let kernel = name("ssm_conv1d.weight");
        Ok(DeltaNet {
            il,
            heads,
            eps: hp.norm_eps,
            norm: Norm::load(loader, hp, &name("attn_norm"), n_embd, hp.norm_bias)?,
            inputs,
            rates,
            kernel: loader.kernels(&kernel, shape.n_past + 1, shape.channels)?,
            decay_bias: loader.vector(&name("ssm_dt.bias"), n_v)?,
            decay_factors: loader.vector(&name("ssm_a"), n_v)?,
            output_norm: Norm::load(loader, hp, &name("ssm_norm"), heads.width, false)?,
            output: loader.matrix(&name("ssm_out.weight"), v, n_embd)?,
        })
    }

    /// Whether queries, keys, values and gates are in one matrix.
    pub(crate) fn has_joint_inputs(&self) -> bool {
        matches!(self.inputs, Inputs::Joint(_))
    }

    /// Operations of the layer. Each writes one record per pass.
    pub(crate) fn ops(&self) -> usize {
        let inputs = match self.inputs {
            Inputs::Separate(_) => 2,
            Inputs::Joint(_) => 3,
        };
        let rates = match self.rates {
            Rates::Separate(_) => 2,
            Rates::Joint(_) => 3,
        };
        let norms = self.norm.ops() + self.output_norm.ops();
        let (convolution, functions, rule, gate, output) = (2, 2, 1, 1, 1);
        norms + inputs + rates + convolution + functions + rule + gate + output
    }

    /// Computes the delta rule and the norm of its output for each row of `x (token, n_embd)`. Updates the states in the cache.
    pub fn read(
        &self,
        ops: &mut Ops,
        at: At,
        s: &mut DeltaNetState,
        x: &mut Activation,
        cache: &mut KvCache,
    ) {
        let (il, heads) = (self.il, self.heads);
        let name = |stem| NodeName::of(stem, il);
        let (d, per_key) = (heads.width, heads.n_v / heads.n_k);
        let norm = ["norm", "attn_norm"].map(name);
        ops.norm(at.device, norm, x, &self.norm, &mut s.normed);
        let qkv = name("linear_attn_qkv_mixed");
        match &self.inputs {
            Inputs::Separate(matrices) => {
                ops.mul_mat(qkv, &matrices[0], &mut s.normed, &mut s.qkv);
            }
            Inputs::Joint(matrix) => {
                let product = name("linear_attn_mixed_qkvz");
                ops.mul_mat(product, matrix, &mut s.normed, &mut s.joint);
                let (values, group) = (per_key * d, 2 * d + 2 * per_key * d);
                let ranges = [0..d, d..2 * d, 2 * d..2 * d + values];
                ops.group_columns((qkv, ""), group, &ranges, &mut s.joint, &mut s.qkv);
                let gates = 2 * d + values..group;
                ops.group_columns((name("z"), ""), group, &[gates], &mut s.joint, &mut s.gates);
            }
        }
        let convolution = Convolution {
            name: name("conv_output_raw"),
            kernel: &self.kernel,
            bias: None,
            silu: Some(name("conv_output_silu")),
        };
        ops.convolve(il, &convolution, &mut s.qkv, cache, &mut s.convolved);
        match &self.rates {
            Rates::Separate(matrices) => {
                let [beta, decay] = &**matrices;
                ops.mul_mat(name("alpha"), decay, &mut s.normed, &mut s.decay);
                ops.decay(
                    name("gate"),
                    &self.decay_bias,
                    &self.decay_factors,
                    &mut s.decay,
                );
                ops.mul_mat(name("beta"), beta, &mut s.normed, &mut s.beta);
            }
            Rates::Joint(matrix) => {
                let product = name("linear_attn_mixed_ba");
                ops.mul_mat(product, matrix, &mut s.normed, &mut s.joint_rates);
                let (rates, group) = (&mut s.joint_rates, 2 * per_key);
                let (betas, decays) = (0..per_key, per_key..group);
                ops.group_columns((name("alpha"), ""), group, &[decays], rates, &mut s.decay);
                ops.decay(
                    name("gate"),
                    &self.decay_bias,
                    &self.decay_factors,
                    &mut s.decay,
                );
                ops.group_columns((name("beta"), ""), group, &[betas], rates, &mut s.beta);
            }
        }
        ops.sigmoid(name("beta_sigmoid"), &mut s.beta);
        let inputs = [&mut s.convolved, &mut s.decay, &mut s.beta];
        let read = name("attn_output");
        ops.delta_net(il, read, (heads, self.eps), inputs, cache, &mut s.read);
        let norm = ["norm", "attn_output_norm"].map(name);
        let (read, normed) = (&mut s.read, &mut s.read_normed);
        ops.norm(at.device, norm, read, &self.output_norm, normed);
    }

    /// `out = output product of the gated values`, after [`DeltaNet::read`]; `out (token, n_embd)`.
    pub fn output(&self, ops: &mut Ops, s: &mut DeltaNetState, out: &mut Activation) {
        let name = |stem| NodeName::of(stem, self.il);
        if let Inputs::Separate(matrices) = &self.inputs {
            ops.mul_mat(name("z"), &matrices[1], &mut s.normed, &mut s.gates);
        }
        let (gates, values) = (&mut s.gates, &mut s.read_normed);
        ops.glu(name("final_output"), Glu::Swiglu, gates, values);
        let product = name("linear_attn_out");
        ops.mul_mat(product, &self.output, gates, out);
        out.name = product.reshaped(); // llama.cpp reshapes the output of all sequences
    }
}
