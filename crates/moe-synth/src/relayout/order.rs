//! The order of tensors in a file.

use moe_gguf::names::{Category, Role, split_layer};

/// The order of tensors in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorOrder {
    /// The old order: shard after shard, in the order of the tensor table.
    File,
    /// The order of use: embeddings, layers by number with tensors in order of execution, output.
    ///
    /// A forward pass then reads the model sequentially.
    Numeric,
    /// Tensors that every token reads first, then tensors that only some tokens read.
    ///
    /// 1. Attention, norms, routers, shared experts and dense blocks of all layers, and the output: one range that a runtime can
    ///    lock or read ahead at once.
    /// 2. The routed experts of each layer. If experts are sorted by hotness, each stacked tensor starts with the hottest. Of
    ///    tensors with a single expert, the hottest of all layers are first.
    /// 3. The embeddings, of which a token reads one row, unless they are also the output matrix.
    HotFirst,
}

/// Sort key of a tensor: section, hotness rank, layer, step in the layer, expert, kind (0 for weights, else 1).
pub(super) type Key = (u8, u32, u16, u16, u32, u8);

/// Returns the sort key of the tensor with this name. Tensors with equal keys keep their order.
///
/// `tied`: the embeddings are also the output matrix.
pub(super) fn key(order: TensorOrder, name: &str, tied: bool) -> Key {
    let role = Role::of(name);
    let (layer, part) = split_layer(name);
    let stem = part.split('.').next().unwrap_or_default();
    let expert = role.expert_id.map_or(0, |expert| expert.0);
    let kind = u8::from(!part.ends_with("weight"));
    let step = match (layer, stem) {
        (Some(_), _) => step(stem, role.category),
        (None, "token_embd") => 0,
        (None, "output") => 2, // After `output_norm`.
        (None, _) => 1,
    };
    let (section, heat) = match (order, layer) {
        (TensorOrder::File, _) => return (0, 0, 0, 0, 0, 0),
        (_, None) if stem.starts_with("output") => (2, 0),
        (TensorOrder::Numeric, None) => (0, 0),
        (TensorOrder::Numeric, Some(_)) => (1, 0),
        (TensorOrder::HotFirst, None) if stem == "token_embd" && !tied => (4, 0),
        (TensorOrder::HotFirst, None) => (0, 0),
        (TensorOrder::HotFirst, Some(_)) => match role.category {
            Category::Expert | Category::ExpertBias => (3, expert),
            _ => (1, 0),
        },
    };
    (
        section,
        heat,
        layer.map_or(0, |layer| layer.0),
        step,
        expert,
        kind,
    )
}

/// Tensors of a layer in the order of use in llama.cpp's graphs.
const STEPS: [&str; 63] = [
    "attn_norm",
    "attn_norm_2",
    // attention
    "attn_qkv",
    "attn_q_a",
    "attn_q_a_norm",
    "attn_q_b",
    "attn_q",
    "attn_q_norm",
    "attn_kv_a_mqa",
    "attn_kv_a_norm",
    "attn_kv_b",
    "attn_k_b",
    "attn_v_b",
    "attn_k",
    "attn_k_norm",
    "attn_v",
    "attn_sinks",
    "attn_gate",
    // state space and linear attention
    "ssm_in",
    "ssm_beta_alpha",
    "ssm_ba",
    "ssm_conv1d",
    "ssm_x",
    "ssm_dt_norm",
    "ssm_dt",
    "ssm_a",
    "ssm_b_norm",
    "ssm_c_norm",
    "ssm_d",
    "ssm_norm",
    "ssm_out",
    OTHER_ATTENTION,
    "attn_sub_norm",
    "attn_output",
    "attn_output_norm",
    "post_attention_norm",
    "layer_out_norm",
    // feed-forward: router, routed experts, shared experts, dense block
    "ffn_norm",
    "ffn_pre_norm",
    "ffn_norm_exps",
    "ffn_gate_tid2eid",
    "ffn_gate_inp",
    "exp_probs_b",
    "ffn_gate_up_exps",
    "ffn_gate_exps",
    "ffn_up_exps",
    "ffn_down_exps",
    "ffn_gate_chexps",
    "ffn_up_chexps",
    "ffn_down_chexps",
    "ffn_gate_inp_shexp",
    "ffn_gate_up_shexp",
    "ffn_gate_shexp",
    "ffn_up_shexp",
    "ffn_down_shexp",
    "ffn_gate_up",
    "ffn_gate",
    "ffn_up",
    "ffn_sub_norm",
    "ffn_down",
    "ffn_post_norm",
    "post_ffw_norm",
    "post_ffw_norm_1",
];

/// Placeholder for attention tensors that are not listed.
const OTHER_ATTENTION: &str = "";

fn step(stem: &str, category: Category) -> u16 {
    let index = |stem: &str| STEPS.iter().position(|step| *step == stem);
    let found = index(stem).or_else(|| match category {
        Category::Attention | Category::Recurrent => index(OTHER_ATTENTION),
        _ => None,
    });
    found.unwrap_or(STEPS.len()) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sorted(order: TensorOrder, tied: bool, names: &[&'static str]) -> Vec<&'static str> {
        let mut names = names.to_vec();
        names.sort_by_key(|name| key(order, name, tied));
        names
    }

    const NAMES: [&str; 14] = [
        "output.weight",
        "blk.10.attn_norm.weight",
        "blk.2.ffn_down_exps.weight",
        "blk.2.ffn_gate_inp.bias",
        "blk.2.ffn_gate_exps.bias",
        "blk.2.ffn_gate_exps.weight",
        "blk.2.ffn_gate_inp.weight",
        "blk.2.ffn_norm.weight",
        "blk.2.attn_output.weight",
        "blk.2.attn_new_thing.weight",
        "blk.2.attn_q.weight",
        "output_norm.weight",
        "token_embd.weight",
        "token_embd_norm.weight",
    ];

    #[test]
    fn numeric_order_is_the_order_of_execution() {
        assert_eq!(
            sorted(TensorOrder::Numeric, false, &NAMES),
            [
                "token_embd.weight",
                "token_embd_norm.weight",
                "blk.2.attn_q.weight",
                "blk.2.attn_new_thing.weight",
                "blk.2.attn_output.weight",
                "blk.2.ffn_norm.weight",
                "blk.2.ffn_gate_inp.weight",
                "blk.2.ffn_gate_inp.bias",
                "blk.2.ffn_gate_exps.weight",
                "blk.2.ffn_gate_exps.bias",
                "blk.2.ffn_down_exps.weight",
                "blk.10.attn_norm.weight",
                "output_norm.weight",
                "output.weight",
            ]
        );
    }

    #[test]
    fn hot_first_order_has_routed_experts_after_dense_tensors() {
        let order = sorted(TensorOrder::HotFirst, false, &NAMES);
        assert_eq!(
            order[8..],
            [
                "output_norm.weight",
                "output.weight",
                "blk.2.ffn_gate_exps.weight",
                "blk.2.ffn_gate_exps.bias",
                "blk.2.ffn_down_exps.weight",
                "token_embd.weight",
            ]
        );
        assert_eq!(order[7], "blk.10.attn_norm.weight");
        let tied = sorted(TensorOrder::HotFirst, true, &NAMES[1..]);
        assert_eq!(tied[0], "token_embd.weight");
    }

    #[test]
    fn sorts_tensors_with_a_single_expert() {
        let names = [
            "blk.1.ffn_up.1.weight",
            "blk.0.ffn_up.1.weight",
            "blk.0.ffn_gate.10.weight",
            "blk.0.ffn_gate.1.weight",
            "blk.0.ffn_up.0.weight",
        ];
        assert_eq!(
            sorted(TensorOrder::Numeric, false, &names),
            [
                "blk.0.ffn_gate.1.weight",
                "blk.0.ffn_gate.10.weight",
                "blk.0.ffn_up.0.weight",
                "blk.0.ffn_up.1.weight",
                "blk.1.ffn_up.1.weight",
            ]
        );
        assert_eq!(
            sorted(TensorOrder::HotFirst, false, &names),
            [
                "blk.0.ffn_up.0.weight",
                "blk.0.ffn_gate.1.weight",
                "blk.0.ffn_up.1.weight",
                "blk.1.ffn_up.1.weight",
                "blk.0.ffn_gate.10.weight",
            ]
        );
    }
}
