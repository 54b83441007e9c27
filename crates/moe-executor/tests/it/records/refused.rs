//! Models and results that are rejected.

use moe_engine::{Decode, Error, Logits};
use moe_executor::cpu::threads::Threads;
use moe_executor::recorder::Recorder;
use moe_executor::{CacheParams, Model, Session};
use moe_gguf::Gguf;
use moe_trace::Phase;

use moe_testkit::fixture;

/// A fixture with the first f32 of a tensor replaced.
fn damaged(file: &str, tensor: &str, value: f32) -> Gguf {
    let path = fixture(file);
    let mut bytes = std::fs::read(&path).unwrap();
    let at = Gguf::open(&path).unwrap().tensor(tensor).unwrap().offset as usize;
    bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
    Gguf::from_bytes(file, bytes).unwrap()
}

#[test]
fn rejects_results_that_are_not_finite() {
    let file = "random-qwen3moe-F16.gguf";
    for (tensor, value, node) in [
        ("blk.2.ffn_norm.weight", f32::NAN, "ffn_moe_logits-2"),
        ("blk.1.attn_norm.weight", f32::INFINITY, "ffn_moe_logits-1"),
        ("output_norm.weight", f32::NAN, "result_output"),
    ] {
        let gguf = damaged(file, tensor, value);
        let model = Model::load(&gguf).unwrap();
        let threads = Threads::new(1).unwrap();
        let mut session =
            Session::new(&model, &threads, Recorder::new(None), CacheParams::new(64)).unwrap();
        let error = session
            .decode(&[300, 301], Phase::Prompt, Logits::Last)
            .unwrap_err();
        assert!(
            matches!(&error, Error::NotFinite { node: found, .. } if found == node),
            "{error}"
        );
    }
}

#[test]
fn rejects_tensors_of_layers_beyond_the_block_count() {
    let path = fixture("random-qwen3moe-F16.gguf");
    let mut bytes = std::fs::read(&path).unwrap();
    let key = b"qwen3moe.block_count";
    let at = bytes.windows(key.len()).position(|w| w == key).unwrap() + key.len() + 4;
    assert_eq!(bytes[at..at + 4], 4u32.to_le_bytes());
    bytes[at] = 3;
    let gguf = Gguf::from_bytes("short", bytes).unwrap();
    let error = Model::load(&gguf).err().unwrap();
    assert!(
        matches!(&error, moe_executor::Error::ExtraLayer { tensor, n_layer: 3, .. } if tensor.starts_with("blk.3.")),
        "{error}"
    );
}
