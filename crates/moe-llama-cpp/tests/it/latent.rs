//! Latent attention: both formats of files, and header keys that the descriptions lack; inputs of delta attention in one matrix.

use moe_engine::Mode;
use moe_gguf::GgmlType;
use moe_synth::model::{Description, Key};

use crate::compare::Exact;
use crate::models::{description, write_described};
use crate::records::{agree, both, graphs_agree};

type Change = fn(&mut Description);

/// A variant of a described model: architecture, what is different, changes.
type Variant = (&'static str, &'static str, &'static [Change]);

const VARIANTS: [Variant; 10] = [
    ("deepseek2", "queries without compression", &[plain_queries]),
    ("deepseek2", "one matrix for keys and values", &[one_matrix]),
    ("deepseek2", "both", &[plain_queries, one_matrix]),
    ("deepseek2", "softmax", &[softmax]),
    ("deepseek2", "linear scaling", &[linear_scaling]),
    ("deepseek2", "groups", &[groups]),
    ("deepseek2", "groups with softmax", &[groups, softmax]),
    ("kimi-linear", "joint inputs", &[joint_inputs]),
    ("kimi-linear", "no number of shared experts", &[unnumbered]),
    ("mistral4", "one matrix for keys and values", &[one_matrix]),
];

fn plain_queries(description: &mut Description) {
    description.set("attention.q_lora_rank", Key::Number(0));
    let compressed = ["attn_q_a.weight", "attn_q_a_norm.weight", "attn_q_b.weight"];
    description.replace_tensors(&compressed, &[("attn_q.weight", &[64, 96])]);
}

/// The format of older files.
fn one_matrix(description: &mut Description) {
    for key in ["attention.key_length_mla", "attention.value_length_mla"] {
        description.keys.remove(key);
    }
    description.set("attention.key_length", Key::Number(24));
    description.set("attention.value_length", Key::Number(16));
    description.set("attention.head_count_kv", Key::Number(4));
    let of_heads = ["attn_k_b.weight", "attn_v_b.weight"];
    description.replace_tensors(&of_heads, &[("attn_kv_b.weight", &[32, 128])]);
}

/// Queries, keys and values of the recurrent layers in one matrix.
fn joint_inputs(description: &mut Description) {
    for range in &mut description.layers {
        if range.tensors.remove("attn_k.weight").is_some() {
            range.tensors.remove("attn_q.weight");
            range.tensors.remove("attn_v.weight");
            let joint = "attn_qkv.weight".to_owned();
            range.tensors.insert(joint, vec![64, 192]);
        }
    }
}

fn unnumbered(description: &mut Description) {
    description.set("expert_shared_count", Key::Number(0));
}

fn softmax(description: &mut Description) {
    description.keys.remove("expert_gating_func");
    description.set("expert_weights_norm", Key::Bool(false));
    description.replace_tensors(&["exp_probs_b.bias"], &[]);
    let router = "ffn_gate_inp.weight".to_owned();
    description.scales.insert(router, 4.0);
}

fn linear_scaling(description: &mut Description) {
    let linear = Key::Text("linear".to_owned());
    description.set("rope.scaling.type", linear);
    description.set("rope.scaling.factor", Key::Float(4.0));
}

fn groups(description: &mut Description) {
    description.set("expert_group_count", Key::Number(4));
    description.set("expert_group_used_count", Key::Number(2));
}

fn changed(arch: &str, changes: &[Change]) -> Description {
    let mut description = description(arch);
    changes.iter().for_each(|change| change(&mut description));
    description
}

#[test]
fn agree_on_both_formats_and_optional_keys() {
    let mut exact = Exact::default();
    for (arch, what, changes) in VARIANTS {
        let dir = tempfile::tempdir().unwrap();
        let path = write_described(dir.path(), &changed(arch, changes), GgmlType::F32);
        exact.compare_batches(&format!("{arch}, {what}"), &path, GgmlType::F32);
    }
    exact.check_all();
}

#[test]
fn records_and_graphs_agree_in_both_formats() {
    for (arch, what, changes) in VARIANTS {
        let dir = tempfile::tempdir().unwrap();
        let path = write_described(dir.path(), &changed(arch, changes), GgmlType::F32);
        let runs = both(dir.path(), &path, Mode::All);
        assert!(agree(&runs) > 500, "{arch}, {what}");
        graphs_agree(&runs);
    }
}
