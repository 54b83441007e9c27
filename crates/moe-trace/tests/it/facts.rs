//! What a model's file says.

use moe_gguf::Gguf;
use moe_testkit::gguf::{ARRAY, Raw, U32};
use moe_trace::Facts;

/// A model whose layers select these numbers of experts.
fn model(n_expert_used: &[u32]) -> Facts {
    let list = Raw::new(0, 3)
        .kv_string("general.architecture", "qwen3moe")
        .kv_u32("qwen3moe.block_count", n_expert_used.len() as u32)
        .string("qwen3moe.expert_used_count")
        .u32(ARRAY)
        .u32(U32)
        .u64(n_expert_used.len() as u64);
    let raw = n_expert_used.iter().fold(list, |raw, &n| raw.u32(n));
    let gguf = Gguf::from_bytes("model.gguf", raw.bytes).unwrap();
    Facts::of_model("model.gguf", &gguf).unwrap()
}

#[test]
fn layers_may_select_different_numbers_of_experts() {
    let facts = model(&[1, 2, 0, 4]);
    assert_eq!(facts.n_expert_used, None);
    let of_block = |block| facts.n_expert_used_in(block);
    let expected = [Some(1), Some(2), None, Some(4), None];
    assert_eq!([0, 1, 2, 3, 4].map(of_block), expected);
    assert_eq!(facts.max_expert_used(), Some(4));
    // What a trace says of itself goes before what the model says.
    let mut of_trace = Facts {
        n_expert_used: Some(3),
        ..Facts::default()
    };
    of_trace.fill_from(&facts);
    assert_eq!(of_trace.max_expert_used(), Some(3));
    assert_eq!(of_trace.n_expert_used_in(3), Some(3));
    let mut unknown = Facts::default();
    unknown.fill_from(&facts);
    assert_eq!(unknown.max_expert_used(), Some(4));
}

#[test]
fn a_list_of_one_number_is_that_number() {
    let facts = model(&[0, 2, 2]);
    assert_eq!(facts.n_expert_used, Some(2));
    assert!(facts.n_expert_used_by_block.is_empty());
    assert_eq!(facts.max_expert_used(), Some(2));
    assert_eq!(model(&[0, 0]).max_expert_used(), None);
}
