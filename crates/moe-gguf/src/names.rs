//! The role of a tensor, derived from its name in the convention of llama.cpp's converters.

use std::fmt;

use moe_ids::{ExpertId, LayerId};
use serde::Serialize;

/// A matrix of a feed-forward block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Projection {
    /// Gate projection, from `n_embd` to `n_ff`.
    Gate,
    /// Up projection, from `n_embd` to `n_ff`.
    Up,
    /// Down projection, from `n_ff` to `n_embd`.
    Down,
    /// Gate and up projections in one tensor, from `n_embd` to `2 * n_ff`.
    GateUp,
}

/// The purpose of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Category {
    /// Weights of routed experts, stacked or with one tensor per expert.
    Expert,
    /// Biases and scales of routed experts.
    ExpertBias,
    /// Weights of the shared expert, and its gate.
    SharedExpert,
    /// Weights and biases of the router.
    Router,
    /// Dense feed-forward blocks, and matrices between router and experts that all tokens use (`ffn_latent_down`).
    DenseFfn,
    /// Attention, and the input projections and gate of linear attention (`attn_qkv`, `attn_gate`).
    Attention,
    /// State-space layers, linear attention and short convolutions, without norms.
    Recurrent,
    /// The indexer of sparse attention, with its norms.
    Indexer,
    /// Factors on the frequencies of RoPE.
    RopeFactors,
    /// Normalization weights.
    Norm,
    /// Embeddings of tokens, positions and token types.
    Embedding,
    /// The output matrix (LM head).
    Output,
    /// All other tensors.
    Other,
}

impl Projection {
    /// The name in tables.
    pub const fn as_str(self) -> &'static str {
        match self {
            Projection::Gate => "gate",
            Projection::Up => "up",
            Projection::Down => "down",
            Projection::GateUp => "gate_up",
        }
    }
}

impl Category {
    /// All categories, in the order of reports.
    pub const ALL: [Category; 13] = [
        Category::Expert,
        Category::ExpertBias,
        Category::SharedExpert,
        Category::Router,
        Category::DenseFfn,
        Category::Attention,
        Category::Recurrent,
        Category::Indexer,
        Category::RopeFactors,
        Category::Norm,
        Category::Embedding,
        Category::Output,
        Category::Other,
    ];

    /// Returns the category of the tensor with this name.
    pub fn of(tensor: &str) -> Category {
        Role::of(tensor).category
    }

    /// The name in tables.
    pub const fn as_str(self) -> &'static str {
        match self {
            Category::Expert => "expert",
            Category::ExpertBias => "expert_bias",
            Category::SharedExpert => "shared_expert",
            Category::Router => "router",
            Category::DenseFfn => "dense_ffn",
            Category::Attention => "attention",
            Category::Recurrent => "recurrent",
            Category::Indexer => "indexer",
            Category::RopeFactors => "rope_factors",
            Category::Norm => "norm",
            Category::Embedding => "embedding",
            Category::Output => "output",
            Category::Other => "other",
        }
    }
}

impl fmt::Display for Projection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl fmt::Display for Category {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// The role of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Role {
    /// The layer, for tensors named `blk.N.…`; otherwise `None`.
    pub layer_id: Option<LayerId>,
    /// Which matrix of a feed-forward block the tensor is; `None` for other tensors.
    pub projection: Option<Projection>,
    /// The purpose of the tensor.
    pub category: Category,
    /// The expert of a tensor with a single expert, as written by older converters.
    pub expert_id: Option<ExpertId>,
    /// Whether the tensor contains the weights of all experts of its layer, according to its name (`_exps`,
    /// `_chexps`).
    pub stacked: bool,
}

impl Role {
    /// Returns the role of the tensor with this name.
    pub fn of(name: &str) -> Role {
        let (layer_id, part) = split_layer(name);
        // `ffn_gate_exps.weight`, `ffn_gate.7.weight`, `ffn_gate_exps.7.weight`: stem, expert, kind.
        let mut pieces = part.split('.');
        let stem = pieces.next().unwrap_or_default();
        let mut kind = pieces.next().unwrap_or_default();
        let mut expert_id = None;
        if let Some(id) = number(kind)
            && stem.starts_with("ffn_")
            && layer_id.is_some()
        {
            expert_id = ExpertId::try_from(id).ok();
            kind = pieces.next().unwrap_or_default();
        }

        let projection = projection(stem);
        let routed = projection.is_some()
            && (expert_id.is_some() || stem.ends_with("_exps") || stem.ends_with("_chexps"));
        if !routed {
            let category = category(stem, layer_id.is_some());
            return Role {
                layer_id,
                projection,
                category,
                expert_id: None,
                stacked: false,
            };
        }
        let weight = kind == "weight" || kind.is_empty();
        Role {
            layer_id,
            projection,
            category: if weight {
                Category::Expert
            } else {
                Category::ExpertBias
            },
            expert_id,
            stacked: weight && expert_id.is_none(),
        }
    }
}

/// Splits the name of a tensor into its layer and the rest: `blk.12.attn_q.weight` into layer 12 and `attn_q.weight`.
/// A name without a layer is returned unchanged.
///
/// 65,535 is not accepted as a layer, because it means "no layer" in traces.
pub fn split_layer(name: &str) -> (Option<LayerId>, &str) {
    let split = name.strip_prefix("blk.").and_then(|rest| {
        let (id, part) = rest.split_once('.')?;
        let id = LayerId::try_from(number(id)?)
            .ok()
            .filter(|&id| id != LayerId(u16::MAX))?;
        Some((id, part))
    });
    match split {
        Some((id, part)) => (Some(id), part),
        None => (None, name),
    }
}

/// Whether the tensor contains chunk experts (`_chexps`), which the router does not select individually.
pub fn is_chunked(name: &str) -> bool {
    name.contains("_chexps")
}

/// Parses a decimal number that consists of digits only.
fn number(text: &str) -> Option<u64> {
    let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    if digits { text.parse().ok() } else { None }
}

fn projection(stem: &str) -> Option<Projection> {
    let rest = stem.strip_prefix("ffn_")?;
    let is = |base: &str| {
        rest.strip_prefix(base)
            .is_some_and(|suffix| matches!(suffix, "" | "_exps" | "_chexps" | "_shexp"))
    };
    match () {
        () if is("gate_up") => Some(Projection::GateUp),
        () if is("gate") => Some(Projection::Gate),
        () if is("up") => Some(Projection::Up),
        () if is("down") => Some(Projection::Down),
        () => None,
    }
}

fn category(stem: &str, in_layer: bool) -> Category {
    if stem.contains("_shexp") {
        return Category::SharedExpert;
    }
    if stem.starts_with("ffn_gate_inp")
        || stem.starts_with("exp_probs")
        || stem == "ffn_gate_tid2eid"
    {
        return Category::Router;
    }
    if stem == "norm" || stem.ends_with("_norm") || stem.contains("_norm_") {
        return Category::Norm;
    }
    match stem {
        "indexer" => return Category::Indexer,
        "shortconv" => return Category::Recurrent,
        "rope_freqs" | "rope_factors_long" | "rope_factors_short" => return Category::RopeFactors,
        _ => {}
    }
    if stem.starts_with("attn_") {
        return Category::Attention;
    }
    if stem.starts_with("ssm_") || stem.starts_with("time_mix_") {
        return Category::Recurrent;
    }
    if stem.starts_with("ffn_") {
        return Category::DenseFfn;
    }
    if stem.contains("token_embd") || matches!(stem, "position_embd" | "token_types") {
        return Category::Embedding;
    }
    if stem == "output" && !in_layer {
        Category::Output
    } else {
        Category::Other
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Category::*;
    use Projection::*;

    #[test]
    fn recognizes_names_of_llama_cpp() {
        // name, layer, projection, category, expert, stacked
        let names = [
            (
                "blk.0.ffn_gate_exps.weight",
                Some(0),
                Some(Gate),
                Expert,
                None,
                true,
            ),
            (
                "blk.7.ffn_up_exps.weight",
                Some(7),
                Some(Up),
                Expert,
                None,
                true,
            ),
            (
                "blk.47.ffn_down_exps.weight",
                Some(47),
                Some(Down),
                Expert,
                None,
                true,
            ),
            (
                "blk.3.ffn_gate_up_exps.weight",
                Some(3),
                Some(GateUp),
                Expert,
                None,
                true,
            ),
            (
                "blk.3.ffn_up_chexps.weight",
                Some(3),
                Some(Up),
                Expert,
                None,
                true,
            ),
            (
                "blk.3.ffn_gate_exps.bias",
                Some(3),
                Some(Gate),
                ExpertBias,
                None,
                false,
            ),
            (
                "blk.3.ffn_down_exps.scale",
                Some(3),
                Some(Down),
                ExpertBias,
                None,
                false,
            ),
            (
                "blk.2.ffn_gate.5.weight",
                Some(2),
                Some(Gate),
                Expert,
                Some(5),
                false,
            ),
            (
                "blk.2.ffn_down_exps.31.weight",
                Some(2),
                Some(Down),
                Expert,
                Some(31),
                false,
            ),
            (
                "blk.2.ffn_up.7.bias",
                Some(2),
                Some(Up),
                ExpertBias,
                Some(7),
                false,
            ),
            (
                "blk.2.ffn_gate_shexp.weight",
                Some(2),
                Some(Gate),
                SharedExpert,
                None,
                false,
            ),
            (
                "blk.2.ffn_gate_inp_shexp.weight",
                Some(2),
                None,
                SharedExpert,
                None,
                false,
            ),
            (
                "blk.2.ffn_gate_inp.weight",
                Some(2),
                None,
                Router,
                None,
                false,
            ),
            ("blk.2.exp_probs_b.bias", Some(2), None, Router, None, false),
            (
                "blk.1.ffn_gate.weight",
                Some(1),
                Some(Gate),
                DenseFfn,
                None,
                false,
            ),
            (
                "blk.1.ffn_latent_down.weight",
                Some(1),
                None,
                DenseFfn,
                None,
                false,
            ),
            (
                "blk.1.shortconv.in_proj.weight",
                Some(1),
                None,
                Recurrent,
                None,
                false,
            ),
            (
                "blk.1.indexer.k_norm.weight",
                Some(1),
                None,
                Indexer,
                None,
                false,
            ),
            (
                "blk.1.attn_qkv.weight",
                Some(1),
                None,
                Attention,
                None,
                false,
            ),
            (
                "blk.1.nextn.eh_proj.weight",
                Some(1),
                None,
                Other,
                None,
                false,
            ),
            ("blk.1.ffn_norm.weight", Some(1), None, Norm, None, false),
            ("blk.1.attn_q_norm.weight", Some(1), None, Norm, None, false),
            (
                "blk.1.post_attention_norm.weight",
                Some(1),
                None,
                Norm,
                None,
                false,
            ),
            (
                "blk.1.attn_sinks.weight",
                Some(1),
                None,
                Attention,
                None,
                false,
            ),
            (
                "blk.1.attn_output.weight",
                Some(1),
                None,
                Attention,
                None,
                false,
            ),
            (
                "blk.1.ssm_conv1d.weight",
                Some(1),
                None,
                Recurrent,
                None,
                false,
            ),
            ("blk.1.ssm_norm.weight", Some(1), None, Norm, None, false),
            ("token_embd.weight", None, None, Embedding, None, false),
            ("token_embd_norm.weight", None, None, Norm, None, false),
            ("output_norm.weight", None, None, Norm, None, false),
            ("output.weight", None, None, Output, None, false),
            ("rope_freqs.weight", None, None, RopeFactors, None, false),
            (
                "rope_factors_long.weight",
                None,
                None,
                RopeFactors,
                None,
                false,
            ),
            ("blk.65535.attn_q.weight", None, None, Other, None, false),
            ("blk..attn_q.weight", None, None, Other, None, false),
            ("", None, None, Other, None, false),
        ];
        for (name, layer_id, projection, category, expert_id, stacked) in names {
            let role = Role {
                layer_id: layer_id.map(LayerId),
                projection,
                category,
                expert_id: expert_id.map(ExpertId),
                stacked,
            };
            assert_eq!(Role::of(name), role, "{name}");
        }
    }
}
