//! Sizes of experts, compared with sizes computed by hand.

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

/// MXFP4 has 17 bytes per 32 elements. Gate and up have 64 rows of 256, down has 256 rows of 64; the F32 biases have 64, 64
/// and 256 elements.
#[test]
fn expert_bytes_include_biases() {
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

/// Gate and up are Q4_K (144 bytes per 256 elements). Down is Q5_0 (22 per 32), in two layers Q8_0 (34 per 32).
#[test]
fn expert_bytes_of_mixed_types() {
    let (gate_up, elements) = (2 * 64 * 144, 64 * 256);
    let gguf = fixture("tiny-qwen3moe-Q4_K_M.gguf");
    for (layer, _, bytes) in sizes(&gguf) {
        let down = if [2, 5].contains(&layer) { 34 } else { 22 };
        assert_eq!(bytes, gate_up + elements / 32 * down, "layer {layer}");
    }
    assert_eq!(sizes(&gguf).len(), 6 * 32);
}

/// The bias of a fused gate-up tensor counts. A separate gate tensor of the same layer, scales and chunk experts do not.
#[test]
fn expert_bytes_of_fused_projections_exclude_scales_and_chunk_experts() {
    let gguf = Raw::new(8, 0)
        .tensor("blk.3.ffn_gate_up_exps.weight", &[4, 10, 2], F32, 0)
        .tensor("blk.3.ffn_gate_up_exps.bias", &[10, 2], F32, 0)
        .tensor("blk.3.ffn_down_exps.weight", &[5, 4, 2], F32, 0)
        .tensor("blk.3.ffn_down_exps.scale", &[2], F32, 0)
        .tensor("blk.3.ffn_gate_exps.weight", &[4, 5, 2], F32, 0)
        .tensor("blk.3.ffn_down_chexps.weight", &[5, 4, 1], F32, 0)
        .tensor("blk.3.ffn_down_shexp.weight", &[5, 4], F32, 0)
        // A layer without a down projection has no experts.
        .tensor("blk.4.ffn_up_exps.weight", &[4, 5, 2], F32, 0)
        .open()
        .unwrap();
    let bytes = 4 * (40 + 10 + 20);
    assert_eq!(
        expert_bytes_by_layer(&OffsetMap::new(&gguf)),
        [(LayerId(3), bytes)].into()
    );
    assert_eq!(sizes(&gguf), [(3, 0, bytes), (3, 1, bytes)]);
    // Both experts, the scale, the separate gate and the chunk; not the shared expert.
    let all = 2 * bytes + 4 * (2 + 40 + 20);
    assert_eq!(expert_layer_bytes(&gguf)[&LayerId(3)], all);
}

/// Older files have one tensor per expert, and the sizes of experts may differ.
#[test]
fn expert_bytes_of_unstacked_experts() {
    let gguf = Raw::new(4, 0)
        .tensor("blk.0.ffn_up.0.weight", &[4, 5], F32, 0)
        .tensor("blk.0.ffn_down.0.weight", &[5, 4], F32, 0)
        .tensor("blk.0.ffn_up.7.weight", &[4, 6], F32, 0)
        .tensor("blk.0.ffn_down.7.weight", &[6, 4], F32, 0)
        .open()
        .unwrap();
    assert_eq!(sizes(&gguf), [(0, 0, 160), (0, 7, 192)]);
    // Layers whose experts differ in size are omitted.
    assert!(expert_bytes_by_layer(&OffsetMap::new(&gguf)).is_empty());
}
