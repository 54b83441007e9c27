//! The tensors of each architecture: names, shapes and contents.
//!
//! Names and shapes are those that llama.cpp requires when it loads a model (`src/models/openai-moe.cpp`, `qwen3moe.cpp`,
//! `qwen3next.cpp`, `llama.cpp` and `olmoe.cpp` in its source tree), in the order of use in a forward pass.

use super::quant::Use;
use super::spec::{Arch, Spec};

/// The contents of a tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Fill {
    /// A constant.
    Constant(f32),
    /// Random values with this standard deviation.
    Noise(f64),
    /// F32 values around 1 with standard deviation 0.1: the weights of a norm, or divisors of frequencies.
    Norm,
    /// The negative of [`Fill::Norm`]: the decay of a recurrent layer.
    Decay,
    /// Random values with standard deviation 1, and a part that is common to all tokens.
    Embedding,
    /// The router of this layer.
    Router(u32),
}

/// A tensor to generate.
#[derive(Clone, Debug)]
pub(super) struct PlannedTensor {
    pub(super) name: String,
    pub(super) usage: Use,
    pub(super) fill: Fill,
    pub(super) ne: Vec<u64>,
    pub(super) layer: u32,
}

/// Standard deviation of biases and attention sinks.
const SMALL: f64 = 0.01;

/// Standard deviation of the logits.
const LOGITS: f64 = 4.0;

/// Variance that all layers together add to the residual stream. The embeddings have variance 1, so that the input of the
/// router is dominated by the embedding of the token in every layer.
pub(super) const ADDED_VARIANCE: f64 = 0.1;

/// Returns the tensors of a model.
pub(super) fn tensors(spec: &Spec) -> Vec<PlannedTensor> {
    let mut list = List {
        tensors: Vec::new(),
        layer: None,
        // Attention and experts of each layer are added to the residual stream.
        residual: (ADDED_VARIANCE / (2.0 * f64::from(spec.n_layer))).sqrt(),
    };
    let (n_embd, n_vocab) = (spec.n_embd, u64::from(spec.vocab.n_tokens));
    list.add(
        "token_embd.weight",
        Use::Embedding,
        Fill::Embedding,
        &[n_embd, n_vocab],
    );
    for layer in 0..spec.n_layer {
        list.layer = Some(layer);
        list.norm("attn_norm", n_embd);
        if spec.is_linear(layer) {
            linear_attention(&mut list, spec);
        } else {
            attention(&mut list, spec);
        }
        let ffn_norm = match spec.arch {
            Arch::GptOss | Arch::Qwen3Next => "post_attention_norm",
            Arch::Qwen3Moe | Arch::Llama | Arch::Olmoe => "ffn_norm",
        };
        list.norm(ffn_norm, n_embd);
        experts(&mut list, spec, layer);
    }
    list.layer = None;
    list.norm("output_norm", n_embd);
    list.matrix("output", Use::Output, LOGITS, n_embd, n_vocab);
    list.tensors
}

fn attention(list: &mut List, spec: &Spec) {
    let (n_embd, d) = (spec.n_embd, spec.head_dim());
    let (n_q, n_kv) = (spec.n_head * d, spec.n_head_kv() * d);
    let biases = spec.arch == Arch::GptOss;
    // In qwen3next, attn_q contains a gate of the same width next to each query.
    let gates = if spec.arch == Arch::Qwen3Next { 2 } else { 1 };
    let mut projection = |name: &str, usage, gain, n_in, n_out| {
        list.matrix(name, usage, gain, n_in, n_out);
        if biases {
            list.bias(name, &[n_out]);
        }
    };
    projection("attn_q", Use::Matrix, 1.0, n_embd, gates * n_q);
    projection("attn_k", Use::Matrix, 1.0, n_embd, n_kv);
    projection("attn_v", Use::AttnV, 1.0, n_embd, n_kv);
    match spec.arch {
        Arch::GptOss => list.add(
            "attn_sinks.weight",
            Use::Small,
            Fill::Noise(SMALL),
            &[spec.n_head],
        ),
        Arch::Qwen3Moe | Arch::Qwen3Next => {
            list.norm("attn_q_norm", d);
            list.norm("attn_k_norm", d);
        }
        Arch::Olmoe => {
            list.norm("attn_q_norm", n_embd);
            list.norm("attn_k_norm", n_embd);
        }
        Arch::Llama => {}
    }
    list.matrix("attn_output", Use::Matrix, list.residual, n_q, n_embd);
    if biases {
        list.bias("attn_output", &[n_embd]);
    }
}

fn linear_attention(list: &mut List, spec: &Spec) {
    let Some(linear) = spec.linear_attention else {
        return;
    };
    let n_embd = spec.n_embd;
    let key = linear.state_size * linear.group_count;
    let value = linear.state_size * linear.time_step_rank;
    let conv = 2 * key + value;
    list.matrix("attn_qkv", Use::Matrix, 1.0, n_embd, conv);
    list.matrix("attn_gate", Use::Matrix, 1.0, n_embd, value);
    list.matrix(
        "ssm_ba",
        Use::Matrix,
        1.0,
        n_embd,
        2 * linear.time_step_rank,
    );
    let kernel = Fill::Noise(1.0 / (linear.conv_kernel as f64).sqrt());
    list.add(
        "ssm_conv1d.weight",
        Use::Small,
        kernel,
        &[linear.conv_kernel, conv],
    );
    list.bias("ssm_dt", &[linear.time_step_rank]);
    // The decay is exp(a · …), so a must be negative.
    list.add(
        "ssm_a",
        Use::Small,
        Fill::Constant(-1.0),
        &[linear.time_step_rank],
    );
    list.norm("ssm_norm", linear.state_size);
    list.matrix("ssm_out", Use::Matrix, list.residual, value, n_embd);
}

fn experts(list: &mut List, spec: &Spec, layer: u32) {
    let (n_embd, n_ff, n_expert) = (spec.n_embd, spec.n_ff_exp, spec.n_expert);
    let biases = spec.arch == Arch::GptOss;
    list.add(
        "ffn_gate_inp.weight",
        Use::Small,
        Fill::Router(layer),
        &[n_embd, n_expert],
    );
    if biases {
        list.add(
            "ffn_gate_inp.bias",
            Use::Small,
            Fill::Constant(0.0),
            &[n_expert],
        );
    }
    for (name, usage, gain, n_in, n_out) in [
        ("ffn_gate_exps", Use::Expert, 1.0, n_embd, n_ff),
        ("ffn_up_exps", Use::Expert, 1.0, n_embd, n_ff),
        (
            "ffn_down_exps",
            Use::ExpertDown,
            list.residual,
            n_ff,
            n_embd,
        ),
    ] {
        let noise = Fill::Noise(gain / (n_in as f64).sqrt());
        list.add(
            &format!("{name}.weight"),
            usage,
            noise,
            &[n_in, n_out, n_expert],
        );
        if biases {
            list.bias(name, &[n_out, n_expert]);
        }
    }
    if spec.arch == Arch::Qwen3Next {
        let n_ff = spec.n_ff_shexp();
        let gate = Fill::Noise(1.0 / (n_embd as f64).sqrt());
        list.add("ffn_gate_inp_shexp.weight", Use::Small, gate, &[n_embd]);
        list.matrix("ffn_gate_shexp", Use::Matrix, 1.0, n_embd, n_ff);
        list.matrix("ffn_up_shexp", Use::Matrix, 1.0, n_embd, n_ff);
        list.matrix("ffn_down_shexp", Use::Matrix, list.residual, n_ff, n_embd);
    }
}

/// A list of tensors under construction.
struct List {
    tensors: Vec<PlannedTensor>,
    /// The layer of the next tensors.
    layer: Option<u32>,
    /// Standard deviation of each addition to the residual stream.
    residual: f64,
}

impl List {
    fn add(&mut self, name: &str, usage: Use, fill: Fill, ne: &[u64]) {
        let name = match self.layer {
            Some(layer) => format!("blk.{layer}.{name}"),
            None => name.to_owned(),
        };
        self.tensors.push(PlannedTensor {
            name,
            usage,
            fill,
            ne: ne.to_vec(),
            layer: self.layer.unwrap_or(0),
        });
    }

    fn norm(&mut self, name: &str, n: u64) {
        self.add(
            &format!("{name}.weight"),
            Use::Small,
            Fill::Constant(1.0),
            &[n],
        );
    }

    fn bias(&mut self, name: &str, ne: &[u64]) {
        self.add(&format!("{name}.bias"), Use::Small, Fill::Noise(SMALL), ne);
    }

    /// Adds a matrix whose outputs have standard deviation `gain` if its inputs have standard deviation 1.
    fn matrix(&mut self, name: &str, usage: Use, gain: f64, n_in: u64, n_out: u64) {
        let noise = Fill::Noise(gain / (n_in as f64).sqrt());
        self.add(&format!("{name}.weight"), usage, noise, &[n_in, n_out]);
    }
}
