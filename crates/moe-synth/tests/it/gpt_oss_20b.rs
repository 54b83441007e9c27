//! gpt-oss-20b with its published shapes in a sparse file, compared with published sizes.

use std::fs::File;
use std::io::Write;

use moe_gguf::check::check;
use moe_gguf::map::{Category, OffsetMap};
use moe_gguf::{GgmlType, Gguf, Value};
use moe_synth::write::Header;
use moe_testkit::{Need, skip};

const N_LAYER: u32 = 24;
const N_EMBD: u64 = 2880;
const N_FF: u64 = 2880;
const N_EXPERT: u64 = 32;
const N_VOCAB: u64 = 201_088;
/// 64 heads of 64, and 8 for keys and values.
const N_Q: u64 = 4096;
const N_KV: u64 = 512;

/// Returns the header of the file with MXFP4 experts and F16 otherwise.
fn header() -> Header {
    use GgmlType::{F16, F32, MXFP4};
    let mut header = Header::new();
    header
        .set("general.architecture", &Value::String("gpt-oss".into()))
        .unwrap();
    let mut add = |name: &str, ty, ne: &[u64]| header.tensor(name, ty, ne).unwrap();
    add("token_embd.weight", F16, &[N_EMBD, N_VOCAB]);
    add("output.weight", F16, &[N_EMBD, N_VOCAB]);
    add("output_norm.weight", F32, &[N_EMBD]);
    for layer in 0..N_LAYER {
        let mut add = |name: &str, ty, ne: &[u64]| add(&format!("blk.{layer}.{name}"), ty, ne);
        add("attn_norm.weight", F32, &[N_EMBD]);
        add("post_attention_norm.weight", F32, &[N_EMBD]);
        add("attn_sinks.weight", F32, &[64]);
        for (name, n_in, n_out) in [
            ("q", N_EMBD, N_Q),
            ("k", N_EMBD, N_KV),
            ("v", N_EMBD, N_KV),
            ("output", N_Q, N_EMBD),
        ] {
            add(&format!("attn_{name}.weight"), F16, &[n_in, n_out]);
            add(&format!("attn_{name}.bias"), F32, &[n_out]);
        }
        add("ffn_gate_inp.weight", F32, &[N_EMBD, N_EXPERT]);
        add("ffn_gate_inp.bias", F32, &[N_EXPERT]);
        for (name, n_in, n_out) in [
            ("gate", N_EMBD, N_FF),
            ("up", N_EMBD, N_FF),
            ("down", N_FF, N_EMBD),
        ] {
            add(
                &format!("ffn_{name}_exps.weight"),
                MXFP4,
                &[n_in, n_out, N_EXPERT],
            );
            add(&format!("ffn_{name}_exps.bias"), F32, &[n_out, N_EXPERT]);
        }
    }
    header
}

#[test]
fn sizes_and_rows_match_published_values() {
    let header = header();
    let mut file = tempfile::NamedTempFile::new().unwrap();
    let bytes = header.encode().unwrap();
    file.write_all(&bytes).unwrap();
    let size = bytes.len() as u64 + header.data_size();
    if let Err(error) = File::set_len(file.as_file(), size) {
        skip(Need::SparseFiles, format_args!("{size} bytes: {error}"));
        return;
    }

    let gguf = Gguf::open(file.path()).unwrap();
    assert_eq!(gguf.tensors().len(), 459);
    let experts = gguf.tensor("blk.23.ffn_down_exps.weight").unwrap();
    assert_eq!(experts.size_bytes, 141_004_800);

    let map = OffsetMap::new(&gguf);
    assert_eq!(map.rows.len(), 2_691);
    let of_experts: Vec<_> = map
        .rows
        .iter()
        .filter(|r| r.category == Category::Expert)
        .collect();
    assert_eq!(of_experts.len(), 2_304);
    assert!(of_experts.iter().all(|row| row.size_bytes == 4_406_400));

    let report = check(&gguf);
    assert!(report.is_sound() && report.llama_cpp_refuses.is_empty());
    assert_eq!(report.tensor_bytes, 13_779_630_336);
    // All tensor sizes are multiples of the alignment, so only the header is padded.
    assert!(report.padding_bytes < 32);
}
