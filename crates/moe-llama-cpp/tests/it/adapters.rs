//! Executor and llama.cpp agree for models with LoRA adapters of random values.

use std::collections::BTreeSet;
use std::fs::File;
use std::path::{Path, PathBuf};

use moe_engine::Mode;
use moe_executor::{Adapter, CacheType};
use moe_gguf::{GgmlType, Gguf, Tensor, Value};
use moe_synth::write;
use moe_trace::Run;

use crate::compare::{Distance, some_tokens};
use crate::engines::{llama_cpp_with, native_with};
use crate::models::{described, fixture, n_vocab};
use crate::records::{agree, both_adapted, graphs_agree};

/// Number of tokens, and the batches of the prompt.
const N_TOKENS: usize = 144;
const PROMPT: [usize; 3] = [1, 7, 64];

/// Which tensors an adapter changes.
#[derive(Clone, Copy, Debug)]
enum Part {
    /// Attention, or the products of a recurrent layer.
    Attention,
    /// Dense blocks and shared experts.
    Dense,
    Router,
    Experts,
    Output,
}

const ALL: [Part; 5] = [
    Part::Attention,
    Part::Dense,
    Part::Router,
    Part::Experts,
    Part::Output,
];

impl Part {
    fn contains(self, part: &str) -> bool {
        let parts: &[&str] = match self {
            Part::Attention => &[
                "attn_q",
                "attn_k",
                "attn_v",
                "attn_qkv",
                "attn_output",
                "in_proj",
                "out_proj",
                "ssm_in",
                "ssm_out",
            ],
            Part::Dense => &[
                "ffn_gate",
                "ffn_up",
                "ffn_down",
                "ffn_gate_shexp",
                "ffn_up_shexp",
                "ffn_down_shexp",
            ],
            Part::Router => &["ffn_gate_inp"],
            Part::Experts => &[
                "ffn_gate_exps",
                "ffn_up_exps",
                "ffn_gate_up_exps",
                "ffn_down_exps",
            ],
            Part::Output => &["output"],
        };
        parts.contains(&part)
    }
}

/// The tensors of a model that an adapter changes. The blocks of an MTP head are omitted.
fn adapted<'g>(model: &'g Gguf, parts: &[Part]) -> Vec<&'g Tensor> {
    let tensors = model.tensors().iter().filter(|tensor| {
        let Some(name) = tensor.name.strip_suffix(".weight") else {
            return false;
        };
        let (block, part) = name.rsplit_once('.').unwrap_or(("", name));
        let mtp = model.tensor(&format!("{block}.nextn.eh_proj.weight"));
        mtp.is_none() && parts.iter().any(|of| of.contains(part))
    });
    tensors.collect()
}

/// `n` random values of a matrix with `width` inputs, whose results are as large as its inputs.
fn values(n: usize, width: u64, state: &mut u64) -> Vec<u8> {
    let scale = (3.0 / width as f32).sqrt();
    let value = |_| {
        *state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let unit = (*state >> 40) as f32 / (1u64 << 24) as f32;
        ((2.0 * unit - 1.0) * scale).to_le_bytes()
    };
    (0..n).flat_map(value).collect()
}

/// Writes an F32 adapter of a model.
fn write_adapter(path: &Path, model: &Gguf, parts: &[Part], rank: u64, alpha: Option<f32>) {
    let arch = model.metadata().str("general.architecture").unwrap();
    let mut header = write::Header::new();
    let text = |text: &str| Value::String(text.into());
    header.set("general.type", &text("adapter")).unwrap();
    header
        .set("general.architecture", &text(arch.unwrap()))
        .unwrap();
    header.set("adapter.type", &text("lora")).unwrap();
    if let Some(alpha) = alpha {
        header
            .set("adapter.lora.alpha", &Value::F32(alpha))
            .unwrap();
    }
    let mut data = Vec::new();
    let mut state = rank;
    for tensor in adapted(model, parts) {
        let [n_in, n_out, n_expert, _] = tensor.ne;
        for (suffix, [n_in, n_out]) in [("lora_a", [n_in, rank]), ("lora_b", [rank, n_out])] {
            let name = format!("{}.{suffix}", tensor.name);
            let ne = [n_in, n_out, n_expert];
            let n_dims = tensor.n_dims as usize;
            header.tensor(&name, GgmlType::F32, &ne[..n_dims]).unwrap();
            let n = usize::try_from(n_in * n_out * n_expert).unwrap();
            data.push(values(n, n_in, &mut state));
        }
    }
    let mut writer = write::Writer::new(File::create(path).unwrap(), header).unwrap();
    for bytes in data {
        writer.write(&bytes).unwrap();
    }
    writer.finish().unwrap();
}

/// Writes an adapter whose factor is half of its scale.
fn adapter(dir: &Path, name: &str, model: &Gguf, parts: &[Part], rank: u64) -> PathBuf {
    let path = dir.join(name);
    write_adapter(&path, model, parts, rank, Some(0.5 * rank as f32));
    path
}

/// The distance of the executor from llama.cpp, and the distance of llama.cpp without adapters, for a model with adapters and their
/// scales.
fn distances(model: &Gguf, adapters: &[(&Gguf, f32)]) -> [Distance; 2] {
    let tokens = some_tokens(N_TOKENS, n_vocab(model), 3);
    let theirs = llama_cpp_with(model, adapters, &tokens, &PROMPT);
    let plain = llama_cpp_with(model, &[], &tokens, &PROMPT);
    let adapters: Vec<Adapter> = adapters
        .iter()
        .map(|&(gguf, scale)| Adapter { gguf, scale })
        .collect();
    let ours = native_with(model, &adapters, &tokens, &PROMPT, CacheType::F32);
    [Distance::of(&theirs, &ours), Distance::of(&theirs, &plain)]
}

/// Compares models in F32. The adapters change the logits by more than the limit.
fn compare_in_f32(name: &str, model: &Gguf, adapters: &[(&Gguf, f32)]) {
    let [ours, plain] = distances(model, adapters);
    println!("{name:32} ours {ours}, without adapters {plain}");
    assert!(plain.mean_top5() > 0.02, "{name}: {plain}");
    // A router may decide a tie either way.
    let has_same_experts = ours.same_experts() == 1.0 || ours.widest_tie < 1e-4;
    assert!(
        has_same_experts && ours.same_experts() >= 0.99,
        "{name}: {ours}"
    );
    assert!(ours.same_top1() == 1.0, "{name}: {ours}");
    assert!(ours.mean_top5() <= 0.001, "{name}: {ours}");
}

#[test]
fn adapters_of_each_part_agree() {
    let dir = tempfile::tempdir().unwrap();
    let model = Gguf::open(described(dir.path(), "glm4moe", GgmlType::F32)).unwrap();
    for part in ALL {
        let name = format!("{part:?}");
        let path = adapter(dir.path(), &name, &model, &[part], 4);
        let adapter = Gguf::open(path).unwrap();
        compare_in_f32(&name, &model, &[(&adapter, 1.0)]);
    }
}

/// Gate and up in one tensor with factors of experts, experts without a gate next to Mamba-2 layers, and short convolutions.
#[test]
fn adapters_of_other_architectures_agree() {
    let dir = tempfile::tempdir().unwrap();
    for arch in ["gemma4", "nemotron_h_moe", "lfm2moe", "llama4"] {
        let model = Gguf::open(described(dir.path(), arch, GgmlType::F32)).unwrap();
        let path = adapter(dir.path(), arch, &model, &ALL, 8);
        let adapter = Gguf::open(path).unwrap();
        compare_in_f32(arch, &model, &[(&adapter, 0.5)]);
    }
}

/// llama.cpp adds several adapters in an undefined order.
#[test]
fn several_adapters_with_scales_agree() {
    let dir = tempfile::tempdir().unwrap();
    let model = Gguf::open(described(dir.path(), "glm4moe", GgmlType::F32)).unwrap();
    let first = adapter(dir.path(), "first", &model, &ALL, 4);
    let second = dir.path().join("second");
    write_adapter(&second, &model, &ALL[1..], 16, None);
    let [first, second] = [first, second].map(|path| Gguf::open(path).unwrap());
    for scales in [[0.5, 0.25], [1.0, 0.0], [-0.5, 0.5]] {
        let adapters = [(&first, scales[0]), (&second, scales[1])];
        compare_in_f32(&format!("{scales:?}"), &model, &adapters);
    }
}

#[test]
fn adapters_of_fixtures_agree() {
    let dir = tempfile::tempdir().unwrap();
    for arch in ["qwen3moe", "gpt-oss"] {
        let model = Gguf::open(fixture(format!("random-{arch}-F16.gguf"))).unwrap();
        let path = adapter(dir.path(), arch, &model, &ALL, 8);
        let adapter = Gguf::open(path).unwrap();
        let [ours, plain] = distances(&model, &[(&adapter, 0.5)]);
        println!("{arch:24} ours {ours}, without adapters {plain}");
        assert!(plain.mean_top5() > 0.04, "{arch}: {plain}");
        assert!(ours.same_experts() >= 0.99, "{arch}: {ours}");
        assert!(ours.mean_top5() <= 0.02, "{arch}: {ours}");
        assert!(ours.widest_tie < 0.05, "{arch}: {ours}");
    }
}

/// Nodes, their order, and the places of the adapter's tensors.
#[test]
fn records_and_graphs_with_an_adapter_agree() {
    for arch in ["qwen3moe", "gpt-oss"] {
        let dir = tempfile::tempdir().unwrap();
        let path = fixture(format!("random-{arch}-F16.gguf"));
        let model = Gguf::open(&path).unwrap();
        let adapter = adapter(dir.path(), "adapter.gguf", &model, &ALL, 8);
        let runs = both_adapted(dir.path(), &path, &adapter, Mode::All);
        assert!(agree(&runs) > 500, "{arch}");
        graphs_agree(&runs);
        let names = |run: &Run| {
            let records = run.trace.records().iter();
            let sources = records.flat_map(|record| {
                let names = record.sources().iter().enumerate();
                let names = names.filter(move |(i, _)| record.source_file[*i].get() == 1);
                names.map(|(_, source)| source.name().into_owned())
            });
            sources.collect::<BTreeSet<String>>()
        };
        let expected = 2 * adapted(&model, &ALL).len();
        assert_eq!(names(&runs[0]).len(), expected, "{arch}");
    }
}

#[test]
fn llama_cpp_rejects_adapter_of_another_model() {
    let dir = tempfile::tempdir().unwrap();
    let model = Gguf::open(fixture("random-qwen3moe-F16.gguf")).unwrap();
    let other = Gguf::open(fixture("random-gpt-oss-F16.gguf")).unwrap();
    let path = adapter(dir.path(), "other.gguf", &other, &ALL, 4);
    let adapter = Gguf::open(path).unwrap();
    let error = moe_llama_cpp::Model::load_with_adapters(&model, &[(&adapter, 1.0)]);
    let error = error.err().unwrap();
    assert!(
        matches!(&error, moe_llama_cpp::Error::Adapter { .. }),
        "{error}"
    );
}
