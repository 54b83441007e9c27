//! Layers of llama.cpp's nodes and tensors, from their names.

use moe_trace::LayerId;
use moe_trace::names::base_name;

/// The layer of a weight (`blk.3.attn_q.weight`), a result (`Qcur-3`, `Qcur-3 (reshaped)`) or a cache (`cache_k_l3`).
pub fn layer_of(name: &str) -> Option<LayerId> {
    if let Some(rest) = name.strip_prefix("blk.") {
        return rest.split('.').next()?.parse().ok();
    }
    let name = base_name(name);
    if name.starts_with("cache_") {
        return name.rsplit_once("_l")?.1.parse().ok();
    }
    name.rsplit_once('-')?.1.parse().ok()
}

/// Whether the name is an automatic one: `node_35`, or the suffix of a view or a copy of a node without a name (` (view)`).
pub fn is_unnamed(name: &str) -> bool {
    let number = name.strip_prefix("node_");
    name.starts_with(" (") || number.is_some_and(|number| number.parse::<u32>().is_ok())
}

/// Whether the name is that of a layer's result.
pub fn ends_layer(name: &str) -> bool {
    name.starts_with("l_out-")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_layers_from_names() {
        for (name, layer) in [
            ("blk.12.ffn_gate_exps.weight", Some(12)),
            ("blk.0.attn_sinks.weight", Some(0)),
            ("ffn_moe_topk-7", Some(7)),
            ("Qcur-3 (view) (permuted)", Some(3)),
            ("g1 f_b(f_a(cur))-3", Some(3)),
            ("cache_k_l11", Some(11)),
            ("cache_v_l0 (view)", Some(0)),
            ("token_embd.weight", None),
            ("result_output", None),
            ("node_35", None),
            ("attn_inp_kq_mask", None),
            ("blk.x.y", None),
            ("a-b", None),
            ("", None),
        ] {
            assert_eq!(layer_of(name), layer.map(LayerId), "{name}");
        }
        assert!(is_unnamed("node_35") && is_unnamed(" (view)"));
        assert!(ends_layer("l_out-3") && !ends_layer("attn_out-3"));
        assert!(!is_unnamed("node_") && !is_unnamed("norm-0"));
    }
}
