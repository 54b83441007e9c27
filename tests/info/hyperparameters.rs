//! Hyperparameters of models that differ between layers, or have wrong types.

use std::fs;
use std::path::Path;

use super::{fact, sound, unsound};
use crate::support::{run, write_gguf};

/// A header with hyperparameters of a hybrid model, in which they differ between layers (Nemotron-H Puzzle).
fn puzzle(path: &Path, expert_used_count: moe_gguf::Value) {
    use moe_gguf::Value as V;
    let list = |values: [u32; 4]| {
        let array = moe_gguf::Array::new(moe_gguf::ValueType::U32, values.map(V::U32));
        V::Array(Box::new(array.unwrap()))
    };
    let keys = [
        ("general.architecture", V::String("nemotron_h_moe".into())),
        ("nemotron_h_moe.block_count", V::U32(4)),
        ("nemotron_h_moe.context_length", V::U32(128)),
        ("nemotron_h_moe.embedding_length", V::U32(32)),
        ("nemotron_h_moe.feed_forward_length", list([0, 32, 0, 32])),
        ("nemotron_h_moe.attention.head_count", V::U32(2)),
        ("nemotron_h_moe.attention.head_count_kv", list([0, 0, 2, 0])),
        ("nemotron_h_moe.expert_count", V::U32(8)),
        ("nemotron_h_moe.expert_used_count", expert_used_count),
    ];
    let tensors = [1, 3].into_iter().flat_map(|layer| {
        let experts = ["gate", "up", "down"].map(|part| {
            let name = format!("blk.{layer}.ffn_{part}_exps.weight");
            (name, vec![32, 32, 8])
        });
        let router = (format!("blk.{layer}.ffn_gate_inp.weight"), vec![32, 8]);
        experts.into_iter().chain([router])
    });
    write_gguf(path, None, &keys, &tensors.collect::<Vec<_>>());
}

fn numbers(values: &[i32]) -> moe_gguf::Value {
    let values = values.iter().map(|&value| moe_gguf::Value::I32(value));
    let array = moe_gguf::Array::new(moe_gguf::ValueType::I32, values);
    moe_gguf::Value::Array(Box::new(array.unwrap()))
}

#[test]
fn more_experts_for_a_token_than_a_layer_has_are_a_fault() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("puzzle.gguf");
    puzzle(&model, moe_gguf::Value::U32(9));
    unsound(&model, "9 experts for a token");
}

#[test]
fn accepts_one_hyperparameter_value_per_layer() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("puzzle.gguf");
    puzzle(&model, numbers(&[0, 2, 0, 2]));
    let facts = sound(&model);
    assert_eq!(fact(&facts, "experts_per_token"), &serde_json::json!([0, 2, 0, 2]));
    assert_eq!(fact(&facts, "experts_per_layer"), 8);
    assert_eq!(fact(&facts, "notes"), &serde_json::json!([]));
    assert!(run!["info", model].contains("[0, 2, 0, 2]"));
    // Every command with --model accepts them: 4 layers, of which two have experts.
    run!["gguf-map", model];
    let learn = dir.path().join("learn.json");
    fs::write(
        &learn,
        r#"{"schema": "llama.cpp.moe_layer_opt_perf.v1", "n_expert": 8, "n_expert_used": 2, "updates": 1,
            "layers": [{"layer": 1, "calls": 5, "cold_experts": [[0, 5], [1, 5]]},
                       {"layer": 3, "calls": 5, "cold_experts": [[7, 9], [2, 1]]}]}"#,
    )
    .unwrap();
    run!["plan", learn, "--model", model, "--budget-mib", "1"];
    run!["hotness", learn, "--model", model];

    puzzle(&model, numbers(&[2; 4]));
    let facts = sound(&model);
    assert_eq!(fact(&facts, "experts_per_token"), 2);
    assert!(facts.get("nextn_layers").is_none());
}

#[test]
fn wrong_hyperparameter_types_are_notes() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("puzzle.gguf");
    for (value, expected) in [
        (numbers(&[]), "has 0 values, but the model has 4 blocks"),
        (numbers(&[2; 3]), "has 3 values, but the model has 4 blocks"),
        (numbers(&[2, -2, 2, 2]), "-2 at index 1"),
        (moe_gguf::Value::String("two".into()), "of type string"),
        (moe_gguf::Value::F32(2.0), "of type f32"),
        (moe_gguf::Value::I32(-2), "(-2)"),
    ] {
        puzzle(&model, value);
        let facts = sound(&model);
        let notes = fact(&facts, "notes").to_string();
        assert!(notes.contains("expert_used_count"), "{notes}");
        assert!(notes.contains(expected), "{notes}");
    }
    let keys = [
        ("general.architecture", moe_gguf::Value::U32(1)),
        ("general.name", moe_gguf::Value::Bool(true)),
    ];
    write_gguf(&model, None, &keys, &[]);
    let facts = sound(&model);
    assert_eq!(fact(&facts, "notes").as_array().unwrap().len(), 2);
}
