//! Bytes of each expert, by hand.

use moe_gguf::experts::{expert_bytes, expert_bytes_by_layer, expert_layer_bytes};
use moe_gguf::map::OffsetMap;
use moe_gguf::{Gguf, LayerId};
use moe_testkit::gguf::{F32, Raw};

use crate::opened::{Opened, fixture};

fn sizes(gguf: &Gguf) -> Vec<(u16, u32, u64)> {
    let sizes = expert_bytes(&OffsetMap::new(gguf)).into_iter();
    sizes
        .map(|((layer, expert), bytes)| (layer.0, expert.0, bytes))
        .collect()
}

/// MXFP4 has 17 bytes for 32 elements. Gate and up are 64 rows of 256, down is 256 rows of 64; F32 biases of 64, 64 and 256.
#[test]
fn biases_count() {
    let weights = 3 * 64 * 256 / 32 * 17;
    let biases = (64 + 64 + 256) * 4;
    let gguf = fixture("tiny-gpt-oss-MXFP4.gguf");
    let expected: Vec<_> = (0..6)
        .flat_map(|layer| (0..32).map(move |expert| (layer, expert, weights + biases)))
        .collect();
    assert_eq!(sizes(&gguf), expected);
    let bytes = expert_layer_bytes(&gguf);
    assert!(
        bytes
            .values()
            .all(|&bytes| bytes == 32 * (weights + biases))
    );
}

/// Gate and up in Q4_K (144 bytes for 256); down in Q5_0 (22 for 32), in two layers in Q8_0 (34 for 32).
#[test]
fn types_are_mixed() {
    let (gate_up, elements) = (2 * 64 * 144, 64 * 256);
    let gguf = fixture("tiny-qwen3moe-Q4_K_M.gguf");
    for (layer, _, bytes) in sizes(&gguf) {
        let down = if [2, 5].contains(&layer) { 34 } else { 22 };
        assert_eq!(bytes, gate_up + elements / 32 * down, "layer {layer}");
    }
    assert_eq!(sizes(&gguf).len(), 6 * 32);
}

/// A fused gate and up, whose bias counts and whose separate twin does not; a scale and chunk experts, which do not count.
#[test]
fn fused_projections_and_scales() {
    let gguf = Raw::new(8, 0)
        .tensor("blk.3.ffn_gate_up_exps.weight", &[4, 10, 2], F32, 0)
        .tensor("blk.3.ffn_gate_up_exps.bias", &[10, 2], F32, 0)
        .tensor("blk.3.ffn_down_exps.weight", &[5, 4, 2], F32, 0)
        .tensor("blk.3.ffn_down_exps.scale", &[2], F32, 0)
        .tensor("blk.3.ffn_gate_exps.weight", &[4, 5, 2], F32, 0)
        .tensor("blk.3.ffn_down_chexps.weight", &[5, 4, 1], F32, 0)
        .tensor("blk.3.ffn_down_shexp.weight", &[5, 4], F32, 0)
        // A layer without down projection is none of experts.
        .tensor("blk.4.ffn_up_exps.weight", &[4, 5, 2], F32, 0)
        .open()
        .unwrap();
    let bytes = 4 * (40 + 10 + 20);
    assert_eq!(
        expert_bytes_by_layer(&OffsetMap::new(&gguf)),
        [(LayerId(3), bytes)].into()
    );
    assert_eq!(sizes(&gguf), [(3, 0, bytes), (3, 1, bytes)]);
    // Both halves, the scale, the separate gate and the chunk; not the shared expert.
    let all = 2 * bytes + 4 * (2 + 40 + 20);
    assert_eq!(expert_layer_bytes(&gguf)[&LayerId(3)], all);
}

/// Older files have a tensor for each expert, and experts may differ.
#[test]
fn experts_in_tensors_of_their_own() {
    let gguf = Raw::new(4, 0)
        .tensor("blk.0.ffn_up.0.weight", &[4, 5], F32, 0)
        .tensor("blk.0.ffn_down.0.weight", &[5, 4], F32, 0)
        .tensor("blk.0.ffn_up.7.weight", &[4, 6], F32, 0)
        .tensor("blk.0.ffn_down.7.weight", &[6, 4], F32, 0)
        .open()
        .unwrap();
    assert_eq!(sizes(&gguf), [(0, 0, 160), (0, 7, 192)]);
    // Experts that differ have no common size.
    assert!(expert_bytes_by_layer(&OffsetMap::new(&gguf)).is_empty());
}
