//! Models of which the fork does not cache all experts, or which llama.cpp does not load.

use std::path::PathBuf;

use moe_gguf::Value as Key;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::{json_of, plan_of, planned, selected, write};
use crate::support::{Arg, arg, args, fail, moe_analyze, run, write_gguf};

/// Size of all experts of a layer of [`model`] in bytes: 8 experts of three 8 × 8 F32 matrices.
const LAYER: u64 = 8 * 3 * 8 * 8 * 4;

/// Writes a model of `n_block` blocks. The first is dense, the last belongs to the MTP head if there is one.
fn model(dir: &TempDir, n_block: u32, n_nextn: u32) -> PathBuf {
    model_of(dir, n_block, n_nextn, &["gate", "up", "down"])
}

/// Writes a model like [`model`] whose experts have these projections.
fn model_of(dir: &TempDir, n_block: u32, n_nextn: u32, projections: &[&str]) -> PathBuf {
    let path = dir.path().join("model.gguf");
    let number = |key: &str, value| (format!("glm4moe.{key}"), Key::U32(value));
    let keys = [
        ("general.architecture".to_owned(), Key::String("glm4moe".into())),
        number("block_count", n_block),
        number("nextn_predict_layers", n_nextn),
        number("expert_count", 8),
        number("expert_used_count", 2),
    ];
    let keys = keys
        .each_ref()
        .map(|(key, value)| (key.as_str(), value.clone()));
    let tensors = (1..n_block).flat_map(|block| {
        projections.iter().map(move |part| {
            let name = format!("blk.{block}.ffn_{part}_exps.weight");
            (name, vec![8, 8, 8])
        })
    });
    let dense = ("blk.0.ffn_up.weight".to_owned(), vec![8, 8]);
    let tensors: Vec<_> = tensors.chain([dense]).collect();
    write_gguf(&path, None, &keys, &tensors);
    path
}

/// A learn file that counts experts 0 and 1 of layers 1 and 4.
fn learn(dir: &TempDir) -> PathBuf {
    let learn = json!({"schema": "llama.cpp.moe_layer_opt_perf.v1", "n_expert": 8, "layers": [
        {"layer": 1, "calls": 7, "experts": [[0, 9], [1, 3]]},
        {"layer": 4, "calls": 7, "experts": [[0, 9], [1, 9]]}]});
    write(dir, "learn.json", &learn.to_string())
}

fn stderr_of(args: impl Arg) -> String {
    let assert = moe_analyze().args(args![args]).assert().success();
    String::from_utf8(assert.get_output().stderr.clone()).unwrap()
}

/// The fork and llama.cpp compute only the hidden layers.
#[test]
fn plans_omit_the_mtp_head() {
    let dir = TempDir::new().unwrap();
    let (learn, mtp) = (learn(&dir), model(&dir, 5, 1));
    let plan = planned(&learn, &mtp, args![]);
    assert_eq!(selected(&plan), [(1, 0, 0), (1, 1, 0)]);
    assert_eq!(plan["estimated_hit_share"], 1.0);
    assert_eq!(plan["llama_cpp"]["layers_on_gpu"], json!([1, 2, 3]));
    assert_eq!(plan["llama_cpp"]["expert_bytes_on_gpu"], 3 * LAYER);
    assert_eq!(plan["llama_cpp"]["estimated_hit_share"], 1.0);
    let warned = stderr_of(plan_of(&learn, &mtp));
    assert!(warned.contains("omitted 2 experts of the MTP head"), "{warned}");
    assert!(!warned.contains("another model"), "{warned}");
    let filled = planned(&learn, &mtp, ["--fill-random"]);
    let layers: Vec<u64> = selected(&filled).iter().map(|(layer, ..)| *layer).collect();
    assert_eq!((layers.len(), layers.iter().max()), (3 * 8, Some(&3)));
    // If the same block is a hidden layer, it is cached.
    let hidden = model(&dir, 5, 0);
    let layers = |plan: &Value| selected(plan).iter().map(|(layer, ..)| *layer).max();
    assert_eq!(layers(&planned(&learn, &hidden, args![])), Some(4));
}

/// The executor does not cache experts without a gate.
#[test]
fn warns_of_experts_without_a_gate() {
    const WARNING: &str =
        "warning: the plan contains 2 layers whose experts have no gate projection;";
    let dir = TempDir::new().unwrap();
    let learn = learn(&dir);
    for (projections, expected) in [
        (&["gate", "up", "down"][..], false),
        (&["gate_up", "down"], false),
        (&["up", "down"], true),
    ] {
        let model = model_of(&dir, 5, 0, projections);
        let warned = stderr_of(plan_of(&learn, &model));
        assert_eq!(warned.contains(WARNING), expected, "{projections:?}: {warned}");
    }
}

#[test]
fn simulations_omit_the_mtp_head() {
    let dir = TempDir::new().unwrap();
    let mtp = model(&dir, 5, 1);
    let lines = (0..3).flat_map(|token| {
        (1..5).map(move |layer| format!("{{\"t\":{token},\"layer\":{layer},\"experts\":[0,1]}}\n"))
    });
    let trace = write(&dir, "trace.jsonl", &lines.collect::<String>());
    let learn = learn(&dir);
    let args = ["simulate", arg(&trace), "--model", arg(&mtp), "--budget-mib", "1"];
    let stderr = stderr_of(args![args, "--learn", learn]);
    assert!(stderr.contains("18 lookups of 24 experts in 3 layers"), "{stderr}");
    assert!(stderr.contains("omitted 6 activations of experts of the MTP head"), "{stderr}");
}

/// The fork's budgets are MiB, and 0 MiB disables its cache.
#[test]
fn prints_no_command_for_budgets_below_1_mib() {
    let dir = TempDir::new().unwrap();
    let (learn, model) = (learn(&dir), model(&dir, 5, 1));
    let plan = |budgets: &str| {
        let model = arg(&model);
        let args = ["plan", arg(&learn), "--model", model, "--budget-bytes", budgets];
        assert!(!run![args].contains("max-mib 0"));
        json_of(args![args, "-o", "json"])
    };
    let small = plan("900000");
    assert_eq!(selected(&small), [(1, 0, 0), (1, 1, 0)]);
    assert!(small["hot_cache"]["command"].is_null());
    let why = small["hot_cache"]["caveats"][0].as_str().unwrap();
    assert!(why.contains("at least 1 MiB"), "{why}");
    let command = plan("1048577")["hot_cache"]["command"].clone();
    assert!(
        command
            .as_str()
            .unwrap()
            .contains("--moe-hot-cache-max-mib 1 ")
    );
}

/// Files from before experts were stacked in one tensor.
#[test]
fn prints_no_command_for_models_that_llama_cpp_rejects() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("old.gguf");
    let tensors = (0..16).flat_map(|i| {
        let (block, expert) = ([1, 4][i / 8], i % 8);
        ["gate", "up", "down"].map(|part| {
            let name = format!("blk.{block}.ffn_{part}.{expert}.weight");
            (name, vec![8, 8])
        })
    });
    let keys = [
        ("general.architecture", Key::String("llama".into())),
        ("llama.block_count", Key::U32(5)),
        ("llama.expert_count", Key::U32(8)),
    ];
    write_gguf(&path, None, &keys, &tensors.collect::<Vec<_>>());
    let learn = learn(&dir);
    let plan = planned(&learn, &path, args![]);
    assert_eq!(selected(&plan), [(1, 0, 0), (4, 0, 0), (4, 1, 0), (1, 1, 0)]);
    assert!(plan["hot_cache"]["command"].is_null());
    assert!(plan["llama_cpp"]["command"].is_null());
    let text = run![plan_of(&learn, &path)];
    assert!(text.contains("convert the model again"), "{text}");
    assert!(!text.contains("llama-server"), "{text}");
}

/// A learn file that numbers the layers with experts from 0 instead of the blocks.
#[test]
fn rejects_counts_of_a_dense_block() {
    let dir = TempDir::new().unwrap();
    let learn = json!({"schema": "llama.cpp.moe_layer_opt_perf.v1", "n_expert": 8, "layers": [
        {"layer": 1, "calls": 7, "experts": [[0, 9], [1, 3]]},
        {"layer": 0, "calls": 7, "experts": [[0, 9], [1, 9]]}]});
    let learn = write(&dir, "learn.json", &learn.to_string());
    let model = model(&dir, 5, 1);
    for error in [
        fail!["--quiet", plan_of(&learn, &model)],
        fail!["--quiet", "hotness", learn, "--model", model],
    ] {
        assert!(error.contains("learn.json: element layer 0: "), "{error}");
        assert!(error.contains("block 0 of the model is dense"), "{error}");
    }
}
