//! LoRA adapters that cannot be used, and their memory and records.

use moe_engine::{Decode, Logits, Mode};
use moe_executor::cpu::threads::Threads;
use moe_executor::recorder::Recorder;
use moe_executor::{Adapter, AdapterFault, CacheParams, Error, Model, Session, Warning};
use moe_gguf::map::OffsetMap;
use moe_gguf::{ExpertId, GgmlType, Gguf, Value};
use moe_synth::write;
use moe_testkit::fixture;
use moe_trace::Phase;

use crate::records::described;

/// A tensor of an adapter: name, and `ne`.
type Entry<'a> = (&'a str, &'a [u64]);

fn model() -> Gguf {
    Gguf::open(fixture("random-qwen3moe-F16.gguf")).unwrap()
}

/// The keys of an adapter of qwen3moe.
fn keys() -> Vec<(&'static str, Value)> {
    let text = |text: &str| Value::String(text.into());
    vec![
        ("general.type", text("adapter")),
        ("general.architecture", text("qwen3moe")),
        ("adapter.type", text("lora")),
        ("adapter.lora.alpha", Value::F32(8.0)),
    ]
}

/// An adapter whose values are 0.
fn adapter(keys: &[(&str, Value)], tensors: &[Entry]) -> Gguf {
    let mut header = write::Header::new();
    for (key, value) in keys {
        header.set(key, value).unwrap();
    }
    for (name, ne) in tensors {
        header.tensor(name, GgmlType::F32, ne).unwrap();
    }
    let sizes: Vec<u64> = header.tensors().iter().map(|t| t.size_bytes).collect();
    let mut writer = write::Writer::new(Vec::new(), header).unwrap();
    for size in sizes {
        writer
            .write(&vec![0; usize::try_from(size).unwrap()])
            .unwrap();
    }
    Gguf::from_bytes("adapter", writer.finish().unwrap()).unwrap()
}

fn fault(keys: &[(&str, Value)], tensors: &[Entry]) -> AdapterFault {
    let (model, adapter) = (model(), adapter(keys, tensors));
    let adapters = [Adapter {
        gguf: &adapter,
        scale: 1.0,
    }];
    match Model::load_with_adapters(&model, &adapters).err().unwrap() {
        Error::Adapter { file, source } => {
            assert_eq!(file.to_str(), Some("adapter"));
            *source
        }
        error => panic!("{error}"),
    }
}

/// Width of the model, of its queries, and of an expert, and number of experts.
fn shapes(model: &Gguf) -> [u64; 4] {
    let [n_embd, n_q, ..] = model.tensor("blk.0.attn_q.weight").unwrap().ne;
    let [_, n_ff, n_expert, _] = model.tensor("blk.0.ffn_up_exps.weight").unwrap().ne;
    [n_embd, n_q, n_ff, n_expert]
}

#[test]
fn rejects_files_that_are_not_adapters_of_the_model() {
    let changed = |key: &str, value: &str| {
        let mut keys = keys();
        let found = keys.iter_mut().find(|(known, _)| *known == key).unwrap();
        found.1 = Value::String(value.into());
        fault(&keys, &[])
    };
    assert!(matches!(
        changed("general.type", "model"),
        AdapterFault::NotAnAdapter { found } if found == "model"
    ));
    assert!(matches!(
        changed("general.architecture", "olmoe"),
        AdapterFault::Architecture { found, expected } if found == "olmoe" && expected == "qwen3moe"
    ));
    assert!(matches!(
        changed("adapter.type", "ia3"),
        AdapterFault::Kind { found } if found == "ia3"
    ));
    assert_eq!(fault(&keys(), &[]), AdapterFault::Empty);
    let mut activated = keys();
    activated.push(("adapter.alora.invocation_tokens", Value::U32(1)));
    assert!(matches!(
        fault(&activated, &[]),
        AdapterFault::Activated { .. }
    ));
}

#[test]
fn rejects_tensors_that_do_not_fit() {
    let [n_embd, n_q, ..] = shapes(&model());
    let (a, b) = ([n_embd, 4], [4, n_q]);
    let pair = |name: &str| [format!("{name}.lora_a"), format!("{name}.lora_b")];
    let of_pair = |name: &str, a: &[u64], b: &[u64]| {
        let [name_a, name_b] = pair(name);
        fault(&keys(), &[(name_a.as_str(), a), (name_b.as_str(), b)])
    };
    let q = "blk.0.attn_q.weight";
    assert!(matches!(
        of_pair("blk.99.attn_q.weight", &a, &b),
        AdapterFault::UnknownTensor { tensor } if tensor == "blk.99.attn_q.weight"
    ));
    for (a, b) in [
        (&[n_embd + 1, 4][..], &b[..]),
        (&a[..], &[4, n_q + 1][..]),
        (&a[..], &[5, n_q][..]),
        (&a[..], &[4, n_q, 2][..]),
    ] {
        let fault = of_pair(q, a, b);
        assert!(matches!(fault, AdapterFault::Shape { .. }), "{fault}");
    }
    for name in ["token_embd.weight", "blk.0.attn_norm.weight"] {
        let ne = model().tensor(name).unwrap().ne;
        let fault = of_pair(name, &[ne[0], 4], &[4, ne[1]]);
        assert!(matches!(fault, AdapterFault::NotApplied { .. }), "{fault}");
    }
    let [name_a, name_b] = pair(q);
    for (name, ne, missing) in [(&name_a, &a, &name_b), (&name_b, &b, &name_a)] {
        let fault = fault(&keys(), &[(name.as_str(), &ne[..])]);
        let expected = AdapterFault::MissingTensor {
            tensor: missing.clone(),
        };
        assert_eq!(fault, expected);
    }
    assert!(matches!(
        fault(&keys(), &[("blk.0.attn_q.weight", &[n_embd])]),
        AdapterFault::Suffix { .. }
    ));
}

/// llama.cpp applies adapters to the output of latent attention, but not to that of Kimi Delta Attention.
#[test]
fn rejects_adapters_of_delta_attention() {
    let gguf = described::model(&described::description("kimi-linear"), GgmlType::F32);
    let mut keys = keys();
    keys[1].1 = Value::String("kimi-linear".into());
    for (layer, is_applied) in [(0, false), (3, true)] {
        let name = |part: &str| format!("blk.{layer}.attn_output.weight.{part}");
        let (name_a, name_b) = (name("lora_a"), name("lora_b"));
        let tensors: [Entry; 2] = [(name_a.as_str(), &[64, 4]), (name_b.as_str(), &[4, 64])];
        let adapter = adapter(&keys, &tensors);
        let adapters = [Adapter {
            gguf: &adapter,
            scale: 1.0,
        }];
        let loaded = Model::load_with_adapters(&gguf, &adapters);
        assert_eq!(loaded.is_ok(), is_applied, "layer {layer}");
    }
}

#[test]
fn offset_map_numbers_files_and_tensors_of_adapters_after_those_of_the_model() {
    let gguf = model();
    let [n_embd, _, n_ff, n_expert] = shapes(&gguf);
    let tensors: [Entry; 2] = [
        ("blk.1.ffn_up_exps.weight.lora_a", &[n_embd, 8, n_expert]),
        ("blk.1.ffn_up_exps.weight.lora_b", &[8, n_ff, n_expert]),
    ];
    let [first, second] = [0, 1].map(|_| adapter(&keys(), &tensors));
    let map = OffsetMap::with_adapters(&gguf, &[&first, &second]);
    let n_rows = OffsetMap::new(&gguf).rows.len();
    let experts = usize::try_from(n_expert).unwrap();
    assert_eq!(map.rows.len(), n_rows + 4 * experts);
    let n_tensors = u32::try_from(gguf.tensors().len()).unwrap();
    for (i, rows) in map.rows[n_rows..].chunks(experts).enumerate() {
        assert_eq!(usize::from(rows[0].file), 1 + i / 2);
        assert_eq!(rows[0].tensor_idx, n_tensors + u32::try_from(i).unwrap());
        assert_eq!(rows[1].expert_id, Some(ExpertId(1)));
    }
}

/// Logits after a prompt.
fn logits(model: &Model) -> Vec<f32> {
    let threads = Threads::new(2).unwrap();
    let cache = CacheParams::new(64);
    let mut session = Session::new(model, &threads, Recorder::new(None), cache).unwrap();
    let logits = session.decode(&[300, 301, 302], Phase::Prompt, Logits::Last);
    logits.unwrap().to_vec()
}

#[test]
fn adapter_of_zeros_changes_operations_and_memory_but_no_logits() {
    let gguf = model();
    let [n_embd, n_q, n_ff, n_expert] = shapes(&gguf);
    let tensors: [Entry; 5] = [
        ("blk.0.attn_q.weight.lora_a", &[n_embd, 4]),
        ("blk.0.attn_q.weight.lora_b", &[4, n_q]),
        ("blk.1.ffn_up_exps.weight.lora_a", &[n_embd, 8, n_expert]),
        ("blk.1.ffn_up_exps.weight.lora_b", &[8, n_ff, n_expert]),
        ("blk.1.attn_norm.weight", &[n_embd]),
    ];
    let adapter = adapter(&keys(), &tensors);
    let plain = Model::load(&gguf).unwrap();
    let load = |scale| {
        let adapters = [Adapter {
            gguf: &adapter,
            scale,
        }];
        Model::load_with_adapters(&gguf, &adapters).unwrap()
    };
    let adapted = load(0.5);
    assert_eq!(logits(&plain), logits(&adapted));
    let records = |model: &Model, n| model.records_per_pass(n, Mode::All);
    // Four operations for the queries; two for the experts, and two of them with a record for each token.
    assert_eq!(records(&adapted, 3), records(&plain, 3) + 4 + 2 + 2 * 3);
    assert_eq!(records(&load(0.0), 3), records(&plain, 3));
    let size = |model: &Model, name: &str| {
        let memory = model.compute_memory(16);
        let buffers = memory.buffers.into_iter();
        let mut sizes = buffers.filter(|buffer| buffer.name == name);
        sizes.next().map(|buffer| buffer.bytes)
    };
    let k = adapted.hparams().n_expert_used as u64;
    let inner = "adapter products of rank";
    assert_eq!(size(&adapted, inner), Some(16 * k * 8 * 4));
    assert_eq!(size(&plain, inner), None);
    let outer = Some((16 * k * n_ff).max(16 * n_q) * 4);
    assert_eq!(size(&adapted, "adapter products"), outer);
    let ignored = Warning::IgnoredAdapterTensor {
        adapter: "adapter".into(),
        tensor: "blk.1.attn_norm.weight".into(),
    };
    assert!(adapted.warnings().contains(&ignored));
}
