//! Plans of described models with a type or mix of types, and with routers that select experts with known frequencies.

use moe_gguf::{Array, GgmlType, Value, ValueType};

use super::Error;
use super::description::{DescribedTensor, Description, Key, MAX_LAYERS, ROUTER};
use super::quant::{Quant, Use};
use super::router::Router;
use super::tensors::{ADDED_VARIANCE, Fill};
use crate::write::Header;

/// A planned file: its header, the contents of each tensor, and the routers with the number of experts.
pub(super) struct Planned {
    pub(super) header: Header,
    pub(super) fills: Vec<Fill>,
    pub(super) routers: Option<(Router, usize)>,
}

/// Plans a described model.
///
/// Embeddings and routers have the contents with which the experts of rank `r` are selected with a frequency proportional to
/// `1 / r^zipf`. If the header has no numbers of embeddings and experts, all matrices are random.
///
/// # Errors
/// The description is invalid, or no matrix has rows of complete blocks of the type.
pub(super) fn plan(description: &Description, quant: &Quant, zipf: f64) -> Result<Planned, Error> {
    let n_layer = match description.keys.get("block_count") {
        Some(Key::Number(n)) if (1..=MAX_LAYERS).contains(n) => *n,
        _ => {
            let problem =
                format!("`block_count` is missing or not a number in the range 1..={MAX_LAYERS}");
            return Err(Error::Spec {
                key: "keys",
                problem,
            });
        }
    };
    let mut header = description.header(&general(description, quant))?;
    let sizes = Sizes::of(description, n_layer);
    let tensors = description.tensors()?;
    let mut fills = Vec::with_capacity(tensors.len());
    let mut embedding = GgmlType::F32;
    for tensor in &tensors {
        let layer = tensor.layer.unwrap_or(0);
        let usage = usage(tensor);
        let ty = quant.ty(usage, tensor.n_in(), layer, n_layer);
        if usage == Use::Embedding {
            embedding = ty;
        }
        header.tensor(&tensor.name(), ty, tensor.ne)?;
        let routed = sizes.as_ref().and_then(|sizes| {
            let has_ffn_norm = || {
                let is_norm =
                    |t: &DescribedTensor| t.layer == tensor.layer && t.part == "ffn_norm.weight";
                tensors.iter().any(is_norm)
            };
            sizes.fill(tensor, has_ffn_norm)
        });
        fills.push(routed.unwrap_or_else(|| description.fill(tensor)));
    }
    let wanted = quant.expert();
    if !header.tensors().iter().any(|tensor| tensor.ty == wanted) {
        let problem = format!(
            "{} has blocks of {} elements, but no matrix of the model has rows of complete blocks; use a type with smaller blocks, such as Q8_0 or F16",
            wanted.name(),
            wanted.block_size()
        );
        return Err(Error::Spec {
            key: "quant",
            problem,
        });
    }
    let routers = sizes.map(|sizes| {
        let n_expert = sizes.n_expert as usize;
        let used = sizes.n_expert_used as usize;
        let n_embd = sizes.n_embd as usize;
        (
            Router::new(embedding, n_embd, n_expert, used, zipf),
            n_expert,
        )
    });
    Ok(Planned {
        header,
        fills,
        routers,
    })
}

/// The keys of the prefix `general.` after the architecture.
fn general(description: &Description, quant: &Quant) -> [(&'static str, Value); 7] {
    let text = |text: &str| Value::String(text.to_owned());
    let name = description.name.as_deref().unwrap_or(&description.arch);
    let tags = ["synthetic", "text-generation"].map(text);
    let tags = Array::new(ValueType::String, tags).expect("all elements have the same type");
    [
        ("type", text("model")),
        ("name", text(name)),
        ("quantized_by", text("moe-analyze synth")),
        ("license", text("none: the weights are random")),
        ("tags", Value::Array(Box::new(tags))),
        ("file_type", Value::U32(quant.file_type)),
        ("quantization_version", Value::U32(2)),
    ]
}

/// The purpose of a tensor, on which its type depends.
fn usage(tensor: &DescribedTensor) -> Use {
    if tensor.is_small() {
        return Use::Small;
    }
    match tensor.part {
        "token_embd.weight" => Use::Embedding,
        "output.weight" => Use::Output,
        "attn_v.weight" => Use::AttnV,
        "ffn_down_exps.weight" => Use::ExpertDown,
        "ffn_gate_exps.weight" | "ffn_up_exps.weight" | "ffn_gate_up_exps.weight" => Use::Expert,
        _ => Use::Matrix,
    }
}

/// Matrices whose results are added to the residual stream.
const RESIDUAL: [&str; 7] = [
    "attn_output.weight",
    "ffn_down.weight",
    "ffn_down_exps.weight",
    "ffn_down_shexp.weight",
    "ffn_latent_up.weight",
    "shortconv.out_proj.weight",
    "ssm_out.weight",
];

/// The sizes on which routers depend.
struct Sizes {
    n_embd: u32,
    n_expert: u32,
    n_expert_used: u32,
    /// Standard deviation of each addition to the residual stream.
    residual: f64,
}

impl Sizes {
    fn of(description: &Description, n_layer: u32) -> Option<Sizes> {
        let number = |key: &str| match description.keys.get(key)? {
            Key::Number(n) => Some(*n),
            Key::Numbers(list) => list.iter().copied().max(),
            _ => None,
        };
        let sizes = Sizes {
            n_embd: number("embedding_length")?,
            n_expert: number("expert_count")?,
            n_expert_used: number("expert_used_count")?,
            residual: (ADDED_VARIANCE / (2.0 * f64::from(n_layer))).sqrt(),
        };
        let has_router = (1..=1 << 14).contains(&sizes.n_expert) && sizes.n_embd > 0;
        has_router.then_some(sizes)
    }

    /// Returns the contents of a tensor on which the frequencies of experts depend; `None` for other tensors.
    ///
    /// The input of a router must be similar to the embedding of the token. So the layers add little to the residual stream, and
    /// factors and biases of the router are constant.
    fn fill(&self, tensor: &DescribedTensor, has_ffn_norm: impl Fn() -> bool) -> Option<Fill> {
        match tensor.part {
            "token_embd.weight" => Some(Fill::Embedding),
            ROUTER => {
                let ne = [u64::from(self.n_embd), u64::from(self.n_expert)];
                let layer = tensor.layer.filter(|_| tensor.ne == ne)?;
                Some(Fill::Router(layer))
            }
            "exp_probs_b.bias" | "ffn_gate_inp.bias" => Some(Fill::Constant(0.0)),
            // Gemma 4 divides the router's input by the root of its width.
            "ffn_gate_inp.scale" => Some(Fill::Constant(f64::from(self.n_embd).sqrt() as f32)),
            "ffn_down_exps.scale" | "layer_output_scale.weight" => Some(Fill::Constant(1.0)),
            "post_ffw_norm.weight" | "layer_output_norm.weight" => {
                Some(Fill::Constant(self.residual as f32))
            }
            // In models without `ffn_norm`, these are the norm before the block.
            "post_attention_norm.weight" | "attn_output_norm.weight" if has_ffn_norm() => {
                Some(Fill::Constant(self.residual as f32))
            }
            part if RESIDUAL.contains(&part) => {
                Some(Fill::Noise(self.residual / (tensor.n_in() as f64).sqrt()))
            }
            _ => None,
        }
    }
}
