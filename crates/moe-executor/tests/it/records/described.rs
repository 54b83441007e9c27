//! Models of the architectures in `fixtures/architectures`.

use std::path::{Path, PathBuf};

use moe_gguf::{GgmlType, Gguf};
use moe_synth::model::{Description, Key, Synth};
use moe_testkit::fixture;

use super::{LIMITS, RunOptions, record};

fn read(path: &Path) -> Description {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// The description of an architecture.
pub fn description(arch: &str) -> Description {
    read(&fixture(format!("architectures/{arch}.json")))
}

/// The format of older files of `deepseek2`, whose cache has the keys and values of all heads; without compressed queries.
pub fn with_decompressed_keys() -> Description {
    let mut description = description("deepseek2");
    for key in ["attention.key_length_mla", "attention.value_length_mla"] {
        description.keys.remove(key);
    }
    for (key, value) in [
        ("attention.q_lora_rank", 0),
        ("attention.key_length", 24),
        ("attention.value_length", 16),
        ("attention.head_count_kv", 4),
    ] {
        description.set(key, Key::Number(value));
    }
    let queries = ["attn_q_a.weight", "attn_q_a_norm.weight", "attn_q_b.weight"];
    description.replace_tensors(&queries, &[("attn_q.weight", &[64, 96])]);
    let of_heads = ["attn_k_b.weight", "attn_v_b.weight"];
    description.replace_tensors(&of_heads, &[("attn_kv_b.weight", &[32, 128])]);
    description
}

fn bytes(description: &Description, ty: GgmlType) -> Vec<u8> {
    let synth = Synth::described(description, ty, 5).unwrap();
    synth.write(Vec::new()).unwrap()
}

/// The model of a description with matrices of type `ty`.
pub fn model(description: &Description, ty: GgmlType) -> Gguf {
    Gguf::from_bytes(&description.arch, bytes(description, ty)).unwrap()
}

/// Writes F16 models. The file of the first model of an architecture has its name.
pub fn write(dir: &Path, descriptions: impl IntoIterator<Item = Description>) -> Vec<PathBuf> {
    let paths = descriptions
        .into_iter()
        .enumerate()
        .map(|(i, description)| {
            let mut path = dir.join(format!("{}.gguf", description.arch));
            if path.exists() {
                path.set_file_name(format!("{}-{i}.gguf", description.arch));
            }
            std::fs::write(&path, bytes(&description, GgmlType::F16)).unwrap();
            path
        });
    paths.collect()
}

/// Writes an F16 model of each description, and one with the other format of latent attention.
pub fn models(dir: &Path) -> Vec<PathBuf> {
    let files = std::fs::read_dir(fixture("architectures")).unwrap();
    let descriptions = files.map(|file| read(&file.unwrap().path()));
    write(dir, descriptions.chain([with_decompressed_keys()]))
}

/// Architectures that select the output rows after the last layer, so that all tokens are routed in all layers.
const ALL_ROUTED: [&str; 6] = [
    "cohere2moe",
    "gemma4",
    "nemotron_h_moe",
    "qwen35moe",
    "qwen3next",
    "step35",
];

/// In the last layer, one of the 20 tokens of the prompt is routed, except in [`ALL_ROUTED`].
#[test]
fn number_of_records_is_close_to_its_bound() {
    let dir = tempfile::tempdir().unwrap();
    let prompt: Vec<u32> = (300..320).collect();
    for path in models(dir.path()) {
        let file = path.to_str().unwrap();
        let recorded = record(file, &prompt, LIMITS, RunOptions::default());
        let n_records = recorded.records.len() as u64;
        let is_all = ALL_ROUTED
            .iter()
            .any(|arch| path.ends_with(format!("{arch}.gguf")));
        let n_other = if is_all { 0 } else { 19 * 3 };
        assert_eq!(recorded.max_records - n_records, n_other, "{file}");
    }
}
