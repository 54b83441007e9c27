//! Categories of nodes, with the names that the viewers of the thesis use.

use std::fmt;

use moe_gguf::map;
use serde::{Deserialize, Serialize};

/// The category of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Category {
    /// Token ids, positions, embeddings.
    Input,
    /// Queries, keys, values, KV cache, attention heads and their output.
    Attention,
    /// Router and experts, dense feed-forward blocks.
    Ffn,
    /// Norms.
    Norm,
    /// The output projection (logits).
    Output,
    /// The residual stream, and unknown nodes.
    #[serde(other)]
    Other,
}

/// Prefixes of node names. The first match counts, so that `ffn_moe_weights_norm` is not a norm.
const PREFIXES: [(&str, Category); 17] = [
    ("inp_", Category::Input),
    ("attn_inp_", Category::Input),
    ("embd", Category::Input),
    ("out_ids", Category::Input),
    ("Qcur", Category::Attention),
    ("Kcur", Category::Attention),
    ("Vcur", Category::Attention),
    ("cache_", Category::Attention),
    ("kq", Category::Attention),
    ("__fattn__", Category::Attention),
    ("attn_out", Category::Attention),
    ("ffn_moe_", Category::Ffn),
    ("ffn_shexp", Category::Ffn),
    ("ffn_norm", Category::Norm),
    ("ffn_", Category::Ffn),
    ("result_norm", Category::Norm),
    ("result_output", Category::Output),
];

impl Category {
    /// The name used in JSON.
    pub const fn as_str(self) -> &'static str {
        match self {
            Category::Input => "input",
            Category::Attention => "attention",
            Category::Ffn => "ffn",
            Category::Norm => "norm",
            Category::Output => "output",
            Category::Other => "other",
        }
    }

    /// Category of an operation's result with this name.
    pub fn of_node(name: &str) -> Category {
        let found = PREFIXES.iter().find(|(prefix, _)| name.starts_with(prefix));
        match found {
            Some((_, category)) => *category,
            None if name.contains("norm") => Category::Norm,
            None => Category::Other,
        }
    }

    /// Category of a tensor of the model with this name.
    pub fn of_weight(name: &str) -> Category {
        match map::Category::of(name) {
            map::Category::Embedding => Category::Input,
            map::Category::Attention | map::Category::Recurrent | map::Category::Indexer => {
                Category::Attention
            }
            map::Category::Norm => Category::Norm,
            map::Category::Output => Category::Output,
            map::Category::Expert
            | map::Category::ExpertBias
            | map::Category::SharedExpert
            | map::Category::Router
            | map::Category::DenseFfn => Category::Ffn,
            map::Category::RopeFactors | map::Category::Other => Category::Other,
        }
    }
}

impl fmt::Display for Category {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::Category::{self, *};

    #[test]
    fn reads_categories_from_names() {
        for (name, category) in [
            ("embd", Input),
            ("attn_inp_kq_mask", Input),
            ("attn_norm-3", Norm),
            ("norm-3", Norm),
            ("Kcur_normed-3", Attention),
            ("attn_out_rows-5", Attention),
            ("ffn_norm-3", Norm),
            ("attn_post_norm-3", Norm),
            ("ffn_moe_weights_norm-3", Ffn),
            ("ffn_inp-3", Ffn),
            ("l_out-3", Other),
            ("result_norm", Norm),
            ("result_output", Output),
            ("node_57", Other),
        ] {
            assert_eq!(Category::of_node(name), category, "{name}");
        }
        for (name, category) in [
            ("token_embd.weight", Input),
            ("blk.3.attn_q.bias", Attention),
            ("blk.3.ssm_in.weight", Attention),
            ("blk.3.attn_norm.weight", Norm),
            ("blk.3.ffn_gate_inp.weight", Ffn),
            ("blk.3.ffn_down_exps.weight", Ffn),
            ("blk.3.ffn_down.weight", Ffn),
            ("output.weight", Output),
            ("rope_freqs.weight", Other),
        ] {
            assert_eq!(Category::of_weight(name), category, "{name}");
        }
    }
}
