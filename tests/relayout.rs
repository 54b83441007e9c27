//! `relayout`: models with their tensors and experts in another order are equivalent.

use std::fs;
use std::path::{Path, PathBuf};

use moe_gguf::Gguf;
use moe_gguf::layers::layer_order;
use moe_testkit::gguf::{F32, Raw};

use crate::support::{N_EXPERT, N_LAYER, arg, args, fail, known_run, moe_analyze, repository, run};

fn fixture(name: &str) -> PathBuf {
    repository(&format!("fixtures/{name}.gguf"))
}

fn temporary() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("new.gguf");
    (dir, out)
}

/// Records a run and writes its learn file.
fn learn(model: &Path, dir: &Path) -> (PathBuf, PathBuf) {
    let (run, learn) = (dir.join("run"), dir.join("learn.json"));
    let record = ["record", "--model", arg(model), "-n", "8", "--out", arg(&run)];
    run![record];
    run!["hotness", run, "--out", learn];
    (run, learn)
}

#[test]
fn numeric_order_is_bit_identical() {
    for (model, n_vocab) in [("tiny-qwen3moe-Q4_K_M", 4096), ("random-gpt-oss-F16", 1024)] {
        let (_dir, out) = temporary();
        let model = fixture(model);
        let text = run!["relayout", model, "--out", out, "--verify"];
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[0].starts_with("bytes: ") && lines[0].ends_with(" keys are identical"));
        assert_eq!(lines[1], format!("logits: identical (9 positions × {n_vocab})"));
        let order = layer_order(&Gguf::open(&out).unwrap());
        assert!(order.is_sequential());
        assert_eq!(order.seeks, 0);
    }
}

#[test]
fn hot_first_starts_with_the_hottest_expert_and_is_equivalent() {
    for name in ["tiny-qwen3moe-Q4_K_M", "tiny-gpt-oss-MXFP4"] {
        let (dir, out) = temporary();
        let model = fixture(name);
        let (_, learn) = learn(&model, dir.path());
        let args = ["--order", "hot-first", "--hotness", arg(&learn), "--out", arg(&out)];
        let text = run!["relayout", model, args, "--verify"];
        assert!(
            text.contains(" are identical, except for the order of experts\nlogits: "),
            "{name}: {text}"
        );

        // The hottest expert of layer 2 in the learn file is first in the new file.
        let learn = fs::read_to_string(learn).unwrap();
        let layers = moe_placement::learn::parse_observations(&learn).unwrap();
        let hottest = layers[2]
            .experts
            .iter()
            .max_by_key(|e| (e.cold, std::cmp::Reverse(e.expert)));
        let hottest = hottest.unwrap().expert.index();
        let (old, new) = (Gguf::open(&model).unwrap(), Gguf::open(&out).unwrap());
        let slice = |gguf: &Gguf, expert: usize| {
            let data = gguf
                .data(gguf.tensor("blk.2.ffn_down_exps.weight").unwrap())
                .unwrap();
            let size = data.len() / 32;
            data[expert * size..][..size].to_vec()
        };
        assert_eq!(slice(&new, 0), slice(&old, hottest));
        // Tensors that every token reads precede the experts, the embeddings follow them.
        let place = |name: &str| new.tensors().iter().position(|t| t.name == name).unwrap();
        assert!(place("blk.5.attn_q.weight") < place("blk.0.ffn_gate_exps.weight"));
        assert_eq!(place("token_embd.weight"), new.tensors().len() - 1);
    }
}

#[test]
fn coactivation_places_coactivated_experts_next_to_each_other() {
    let (dir, out) = temporary();
    let run = dir.path().join("run");
    known_run(&run);
    let model = fixture("tiny-qwen3moe-Q4_K_M");
    let args = ["--permute-experts", "coactivation", "--trace", arg(&run), "--out", arg(&out)];
    let text = run!["relayout", model, args, "--verify"];
    assert!(text.contains("except for the order of experts\n"), "{text}");
    // Every token of the known run selects expert 3, so it is first in every layer.
    let (old, new) = (Gguf::open(&model).unwrap(), Gguf::open(&out).unwrap());
    for layer in 0..N_LAYER {
        let row = |gguf: &Gguf, expert: usize| {
            let name = format!("blk.{layer}.ffn_gate_inp.weight");
            let data = gguf.data(gguf.tensor(&name).unwrap()).unwrap();
            let size = data.len() / N_EXPERT as usize;
            data[expert * size..][..size].to_vec()
        };
        assert_eq!(row(&new, 0), row(&old, 3), "layer {layer}");
    }
}

#[test]
fn rejects_run_of_another_model_and_warns_without_manifest() {
    let (dir, out) = temporary();
    let run = dir.path().join("run");
    known_run(&run);
    let coactivation = |model: &Path, trace: &Path| {
        moe_analyze()
            .args(args!["relayout", model, "--out", out])
            .args(args!["--permute-experts", "coactivation", "--trace", trace])
            .output()
            .unwrap()
    };
    // A model of the same shape with another name. The first letter of the name follows the key, a type and a length.
    let (own, other) = (fixture("tiny-qwen3moe-Q4_K_M"), dir.path().join("other.gguf"));
    let mut bytes = fs::read(&own).unwrap();
    let key = b"general.name";
    let at = bytes.windows(key.len()).position(|window| window == key);
    bytes[at.unwrap() + key.len() + 4 + 8] = b'X';
    fs::write(&other, bytes).unwrap();
    let hash = |path: &Path| format!("{:016x}", Gguf::open(path).unwrap().header_xxh3());
    let refused = coactivation(&other, &run);
    let stderr = String::from_utf8(refused.stderr).unwrap();
    assert_eq!(refused.status.code(), Some(2), "{stderr}");
    for part in ["is a run of another model", &hash(&own), &hash(&other)] {
        assert!(stderr.contains(part), "{part}: {stderr}");
    }
    assert!(!out.exists());

    let bare = coactivation(&own, &run.join("trace.bin"));
    let stderr = String::from_utf8(bare.stderr).unwrap();
    assert_eq!(bare.status.code(), Some(0), "{stderr}");
    assert!(stderr.contains("cannot be detected"), "{stderr}");
    // Experts have new ids, so files that contain expert ids are outdated.
    assert!(stderr.contains("experts have different ids"), "{stderr}");
}

#[test]
fn expert_permutation_can_be_reverted() {
    let (dir, out) = temporary();
    let model = fixture("random-qwen3moe-F16");
    let order = dir.path().join("order.json");
    let reversed: Vec<u32> = (0..16).rev().collect();
    fs::write(&order, serde_json::json!({ "1": reversed, "3": reversed }).to_string()).unwrap();
    let args = ["--order", "file", "--permute-experts", arg(&order)];
    run!["relayout", model, "--out", out, "--verify", args];
    let back = dir.path().join("back.gguf");
    run!["relayout", out, "--out", back, args];
    assert!(fs::read(&out).unwrap() != fs::read(&model).unwrap());
    assert!(fs::read(&back).unwrap() == fs::read(&model).unwrap());
}

#[test]
fn compares_bytes_of_a_model_that_cannot_run() {
    use moe_synth::write::{Header, Writer};
    let (dir, out) = temporary();
    let model = dir.path().join("odd.gguf");
    let mut header = Header::new();
    header
        .set("general.architecture", &moe_gguf::Value::String("odd".into()))
        .unwrap();
    header
        .tensor("blk.0.attn_q.weight", moe_gguf::GgmlType::F32, &[4])
        .unwrap();
    let mut writer = Writer::new(fs::File::create(&model).unwrap(), header).unwrap();
    writer.write(&[7; 16]).unwrap();
    writer.finish().unwrap();
    let assert = moe_analyze()
        .args(args!["relayout", model, "--out", out, "--verify"])
        .assert()
        .success()
        .stdout("bytes: 1 tensor and 1 key are identical\n");
    let stderr = String::from_utf8(assert.get_output().stderr.clone()).unwrap();
    assert!(stderr.contains("because the model cannot run") && stderr.contains("odd"), "{stderr}");
}

#[test]
fn rejects_invalid_orders_without_output() {
    let (dir, out) = temporary();
    let model = fixture("random-qwen3moe-F16");
    let refused = |args: &[&str], part: &str| {
        let line = fail!["relayout", model, "--out", out, args];
        assert!(line.contains(part), "{line}");
        assert!(!out.exists());
    };
    refused(&["--order", "hot-first"], "needs --hotness");
    let order = dir.path().join("order.json");
    fs::write(&order, "{\"1\": [0, 0]}").unwrap();
    refused(&["--hotness", arg(&order)], "--permute-experts");
    refused(&["--permute-experts", "coactivation"], "add --trace");
    refused(&["--trace", arg(&order)], "coactivation");
    refused(
        &["--permute-experts", arg(&order)],
        "contains 2 experts, but the layer has 16; list each expert from 0 to 15 once",
    );
    fs::write(&order, "{\"9\": [0]}").unwrap();
    refused(&["--permute-experts", arg(&order)], "layer 9");
    fs::write(&order, "{\"0\": [1, 0], \"0\": [0, 1]}").unwrap();
    refused(&["--permute-experts", arg(&order)], "the key \"0\" appears twice");
    fs::write(&order, "[1]").unwrap();
    refused(&["--permute-experts", arg(&order)], "order.json");
    // A learn file of a model with more experts.
    let (_, learn) = learn(&fixture("tiny-qwen3moe-Q4_K_M"), dir.path());
    refused(&["--order", "hot-first", "--hotness", arg(&learn)], "pass a file of this model");
}

#[test]
fn rejects_truncated_model_without_output() {
    let (dir, out) = temporary();
    let truncated = dir.path().join("short.gguf");
    let whole = fs::read(fixture("random-gpt-oss-F16")).unwrap();
    fs::write(&truncated, &whole[..whole.len() - 1000]).unwrap();
    let line = fail!["relayout", truncated, "--out", out];
    assert!(line.contains("is truncated"), "{line}");
    assert!(!out.exists());
}

/// In a rewritten file, each tensor would have separate bytes, and the file would look sound.
#[test]
fn rejects_overlapping_tensors() {
    let (dir, out) = temporary();
    let model = dir.path().join("overlap.gguf");
    let raw = Raw::new(2, 0)
        .tensor("a", &[8], F32, 0)
        .tensor("b", &[8], F32, 0)
        .data(32, 64);
    fs::write(&model, raw.bytes).unwrap();
    let line = fail!["relayout", model, "--out", out];
    assert!(line.contains("\"b\" overlaps \"a\" by 32 bytes"), "{line}");
    assert!(!out.exists());
}

#[test]
fn keeps_existing_file_and_input_model() {
    let (dir, out) = temporary();
    let model = fixture("random-gpt-oss-F16");
    fs::write(&out, "mine").unwrap();
    let line = fail!["relayout", model, "--out", out];
    assert!(line.contains("--force"), "{line}");
    assert_eq!(fs::read(&out).unwrap(), b"mine");
    run!["relayout", model, "--out", out, "--force"];
    let line = fail!["relayout", out, "--out", out, "--force"];
    assert!(line.contains("is an input"), "{line}");
    let left: Vec<_> = fs::read_dir(dir.path()).unwrap().collect();
    assert_eq!(left.len(), 1, "no temporary file is left");
}

#[test]
fn requires_extension_gguf() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("new.bin");
    let line = fail!["relayout", fixture("tiny-qwen3moe-Q4_K_M"), "--out", out];
    assert!(line.contains("the extension must be .gguf"), "{line}");
    assert!(!out.exists());
}

#[test]
fn rejects_traces_without_routing_for_coactivation() {
    let (_dir, out) = temporary();
    let model = fixture("tiny-qwen3moe-Q4_K_M");
    let line = fail![
        "relayout", model, "--permute-experts", "coactivation", "--trace", model, "--out", out
    ];
    assert!(line.contains("is not a run"), "{line}");
}
