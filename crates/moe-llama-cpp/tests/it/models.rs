//! Small models: synthetic ones, and fixtures converted to other types.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::ptr;

use llama_cpp_sys_2 as sys;
use moe_gguf::{GgmlType, Gguf, Value};
use moe_synth::model::{Description, Spec, Synth, SynthOptions};
use moe_synth::write;
pub use moe_testkit::fixture;

/// Size of a synthetic vocabulary.
pub const N_VOCAB: u32 = 512;

/// Size of a model's vocabulary.
pub fn n_vocab(gguf: &Gguf) -> u32 {
    let tokens = gguf.metadata().strings("tokenizer.ggml.tokens").unwrap();
    u32::try_from(tokens.unwrap().len()).unwrap()
}

/// The header of a published model with fewer and narrower layers.
pub fn small(like: &str, quant: &str) -> Spec {
    let mut spec = Spec::like(like).unwrap();
    spec.n_layer = 4;
    spec.n_embd = 256;
    spec.n_head = 4;
    spec.n_head_kv = spec.n_head_kv.map(|_| 2);
    spec.head_dim = spec.head_dim.map(|_| 64);
    spec.n_expert = 16;
    spec.n_expert_used = spec.n_expert_used.min(4);
    spec.n_ff_exp = 256;
    spec.n_ff = spec.n_ff.map(|_| 256);
    spec.context_length = 4096;
    spec.sliding_window = 64;
    spec.quant = quant.to_owned();
    let vocab = &mut spec.vocab;
    vocab.n_tokens = N_VOCAB;
    vocab.n_merges = vocab.n_merges.map(|_| 200);
    vocab.n_special = vocab.n_special.min(8);
    vocab.text_bytes = None;
    for id in [&mut vocab.bos, &mut vocab.eos, &mut vocab.pad] {
        *id = id.map(|id| id.min(N_VOCAB - 1));
    }
    spec
}

/// Writes a synthetic model.
pub fn make(dir: &Path, name: &str, spec: &Spec) -> PathBuf {
    let path = dir.join(format!("{name}.gguf"));
    let options = SynthOptions { seed: 7, zipf: 0.5 };
    let synth = Synth::new(spec, options).unwrap();
    synth.write(File::create(&path).unwrap()).unwrap();
    path
}

/// The description `fixtures/architectures/ARCH.json`.
pub fn description(arch: &str) -> Description {
    edited_description(arch, |_| {})
}

/// The description `fixtures/architectures/ARCH.json` after `edit` has changed its header keys.
fn edited_description(arch: &str, edit: impl FnOnce(&mut serde_json::Value)) -> Description {
    let json = std::fs::read(fixture(format!("architectures/{arch}.json"))).unwrap();
    let mut json: serde_json::Value = serde_json::from_slice(&json).unwrap();
    edit(&mut json["keys"]);
    serde_json::from_value(json).unwrap()
}

/// Writes the model of `fixtures/architectures/ARCH.json` after `edit` has changed its header keys.
pub fn described_with(
    dir: &Path,
    arch: &str,
    ty: GgmlType,
    edit: impl FnOnce(&mut serde_json::Value),
) -> PathBuf {
    write_described(dir, &edited_description(arch, edit), ty)
}

/// Writes the model of a description with random matrices of type `ty`.
pub fn write_described(dir: &Path, description: &Description, ty: GgmlType) -> PathBuf {
    let synth = Synth::described(description, ty, 5).unwrap();
    let path = dir.join(format!("{}-{}.gguf", description.arch, ty.name()));
    synth.write(File::create(&path).unwrap()).unwrap();
    path
}

/// Writes the model of `fixtures/architectures/ARCH.json` with random matrices of type `ty`.
pub fn described(dir: &Path, arch: &str, ty: GgmlType) -> PathBuf {
    write_described(dir, &description(arch), ty)
}

/// Writes a fixture with changed values of some keys.
pub fn changed(dir: &Path, model: &str, keys: &[(&str, Value)]) -> PathBuf {
    extended(dir, model, keys, &BTreeMap::new())
}

/// Writes a fixture with changed values of some keys and additional F32 vectors.
pub fn extended(
    dir: &Path,
    model: &str,
    keys: &[(&str, Value)],
    vectors: &BTreeMap<String, Vec<f32>>,
) -> PathBuf {
    let gguf = Gguf::open(fixture(format!("{model}.gguf"))).unwrap();
    let is_changed = |key: &str| keys.iter().any(|(changed, _)| *changed == key);
    let mut header = write::Header::like(&gguf, is_changed).unwrap();
    for (key, value) in keys {
        header.set(key, value).unwrap();
    }
    for t in gguf.tensors() {
        let ne = &t.ne[..t.n_dims as usize];
        header.tensor(&t.name, t.ty, ne).unwrap();
    }
    for (name, values) in vectors {
        let ne = [values.len() as u64];
        header.tensor(name, GgmlType::F32, &ne).unwrap();
    }
    let path = dir.join(format!("{model}-changed.gguf"));
    let mut writer = write::Writer::new(File::create(&path).unwrap(), header).unwrap();
    for t in gguf.tensors() {
        writer.write(gguf.data(t).unwrap()).unwrap();
    }
    for value in vectors.values().flatten() {
        writer.write(&value.to_le_bytes()).unwrap();
    }
    writer.finish().unwrap();
    path
}

/// Writes an F16 model with its weights converted to another type by ggml's quantizer. Tensors whose rows are not an integer
/// number of blocks are not converted.
pub fn in_type(dir: &Path, model: &Path, ty: GgmlType) -> PathBuf {
    let gguf = Gguf::open(model).unwrap();
    let mut header = write::Header::like(&gguf, |_| false).unwrap();
    let becomes = |t: &moe_gguf::Tensor| t.ty == GgmlType::F16 && ty.row_size(t.ne[0]).is_some();
    for t in gguf.tensors() {
        let new = if becomes(t) { ty } else { t.ty };
        header
            .tensor(&t.name, new, &t.ne[..t.n_dims as usize])
            .unwrap();
    }
    let stem = model.file_stem().unwrap().to_str().unwrap();
    let path = dir.join(format!("{stem}-{}.gguf", ty.name()));
    let mut writer = write::Writer::new(File::create(&path).unwrap(), header).unwrap();
    for t in gguf.tensors() {
        let data = gguf.data(t).unwrap();
        if becomes(t) {
            let values: Vec<f32> = data
                .chunks_exact(2)
                .map(|b| half::f16::from_le_bytes([b[0], b[1]]).to_f32())
                .collect();
            writer
                .write(&quantize(ty, &values, t.ne[0] as usize))
                .unwrap();
        } else {
            writer.write(data).unwrap();
        }
    }
    writer.finish().unwrap();
    path
}

/// Quantizes rows of `n` values with ggml's quantizer, with equal importance for all values.
pub fn quantize(ty: GgmlType, values: &[f32], n: usize) -> Vec<u8> {
    let n_rows = values.len() / n;
    let mut bytes = vec![0u8; n_rows * ty.row_size(n as u64).unwrap() as usize];
    let importance = vec![1.0f32; n];
    // SAFETY: the function has no preconditions.
    let wanted = unsafe { sys::ggml_quantize_requires_imatrix(ty.id()) };
    let importance = if wanted {
        importance.as_ptr()
    } else {
        ptr::null()
    };
    // SAFETY: `values` has `n_rows` rows of `n`, `bytes` is large enough for them, and `importance` has `n` values.
    let written = unsafe {
        sys::ggml_quantize_chunk(
            ty.id(),
            values.as_ptr(),
            bytes.as_mut_ptr().cast(),
            0,
            n_rows as i64,
            n as i64,
            importance,
        )
    };
    assert_eq!(written, bytes.len(), "{}", ty.name());
    bytes
}
