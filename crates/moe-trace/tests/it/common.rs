//! Records and models that several tests use.
#![allow(dead_code)] // no test uses all of them

use std::path::{Path, PathBuf};

use moe_gguf::Gguf;
use moe_gguf::map::OffsetMap;
use moe_trace::manifest::{Engine, Manifest, Model, ModelFile, Sampling, Tokens};
use moe_trace::ops::MUL_MAT_ID;
use moe_trace::record::{EXT_V1, FLAG_CONTINUATION, SOURCE_BUFFER, SOURCE_DISK, lane, set_name};
use moe_trace::{NO_LAYER, NO_TENSOR, Run, RunOptions, RunWriter, TensorAccessLog};

/// A model of `fixtures/`.
pub fn model(name: &str) -> Gguf {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../../fixtures")
        .join(name);
    Gguf::open(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// `random-gpt-oss-F16.gguf` and its map: 4 layers, 16 experts, top-4, expert biases.
pub fn gpt_oss() -> (Gguf, OffsetMap) {
    let gguf = model("random-gpt-oss-F16.gguf");
    let map = OffsetMap::new(&gguf);
    (gguf, map)
}

pub fn manifest() -> Manifest {
    Manifest {
        engine: Engine {
            name: "moe-analyze".into(),
            version: "0.1.0".into(),
        },
        command: vec!["moe-analyze".into(), "record".into()],
        model: Model {
            path: "fixtures/random-gpt-oss-F16.gguf".into(),
            files: vec![ModelFile {
                name: "random-gpt-oss-F16.gguf".into(),
                size_bytes: 642_048,
            }],
            header_xxh3: "0123456789abcdef".into(),
            arch: "gpt-oss".into(),
            n_layer: 4,
            n_expert: 16,
            n_expert_used: 4,
            expert_types: vec!["F16".into()],
            ..Default::default()
        },
        tokens: Tokens {
            prompt: 6,
            generated: 64,
            sequences: 1,
        },
        sampling: Sampling {
            method: "greedy".into(),
            ..Default::default()
        },
        policy: "cpu".into(),
        n_threads: 2,
        started: "2026-07-01T12:34:56Z".into(),
        ..Default::default()
    }
}

/// Writes `records` as a run of `random-gpt-oss-F16.gguf`.
pub fn run_of(dir: &Path, records: &[TensorAccessLog]) -> Run {
    let (_, map) = gpt_oss();
    let mut writer = RunWriter::create(dir, manifest(), &map, RunOptions::default()).unwrap();
    for record in records {
        *writer.next_record().unwrap() = *record;
    }
    writer.finish().unwrap();
    Run::open(dir).unwrap()
}

/// A record of one token without layer and sources.
pub fn record(timestamp_ns: u64, op: u8, dst_name: &str) -> TensorAccessLog {
    let mut record = TensorAccessLog {
        operation_type: op,
        ext_version: EXT_V1,
        ..Default::default()
    };
    record.timestamp_ns.set(timestamp_ns);
    record.layer_id.set(NO_LAYER);
    record.duration_ns.set(500);
    record.n_tokens.set(1);
    set_name(&mut record.dst_name, dst_name);
    record
}

/// Adds a tensor of the model as a source.
pub fn read_tensor(record: &mut TensorAccessLog, gguf: &Gguf, name: &str) {
    let tensor = gguf
        .tensor(name)
        .unwrap_or_else(|| panic!("the fixture has {name}"));
    let i = usize::from(record.num_sources);
    let source = &mut record.sources[i];
    set_name(&mut source.name, name);
    source.memory_source = SOURCE_DISK;
    source.tensor_idx.set(tensor.index);
    source.offset_or_buffer_id.set(tensor.offset);
    record.set_source_size(i, tensor.size_bytes);
    record.num_sources += 1;
}

/// Adds a buffer as a source.
pub fn read_buffer(record: &mut TensorAccessLog, name: &str, id: u64, size_bytes: u64) {
    let i = usize::from(record.num_sources);
    let source = &mut record.sources[i];
    set_name(&mut source.name, name);
    source.memory_source = SOURCE_BUFFER;
    source.tensor_idx.set(NO_TENSOR);
    source.offset_or_buffer_id.set(id);
    record.set_source_size(i, size_bytes);
    record.num_sources += 1;
}

/// The records of an expert operation: for each token of the batch its experts, best first.
///
/// Weights are 1/1, 1/2, 1/3 ... by rank, lanes are CPU, token positions start at `first_token`.
pub fn expert_operation(
    head: &TensorAccessLog,
    layer: u16,
    first_token: u32,
    tokens: &[&[i32]],
) -> Vec<TensorAccessLog> {
    let mut records = Vec::new();
    for (token, experts) in (first_token..).zip(tokens) {
        for (part, experts) in experts.chunks(16).enumerate() {
            let mut record = *head;
            record.layer_id.set(layer);
            record.token_id.set(token);
            record.n_tokens.set(tokens.len() as u32);
            record.num_experts = experts.len() as u8;
            record.expert_slot_base = part as u8 * 16;
            record.flags = if part > 0 { FLAG_CONTINUATION } else { 0 };
            for (i, expert) in experts.iter().enumerate() {
                record.expert_ids[i].set(*expert);
                record.expert_weights[i].set(1.0 / (part * 16 + i + 1) as f32);
                record.expert_lane[i] = lane::CPU;
            }
            records.push(record);
        }
    }
    records
}

/// The expert operations of a layer: gate, up and down, with the same experts.
pub fn expert_layer(
    gguf: &Gguf,
    timestamp_ns: u64,
    layer: u16,
    first_token: u32,
    tokens: &[&[i32]],
) -> Vec<TensorAccessLog> {
    let mut records = Vec::new();
    for (i, projection) in (0..).zip(["gate", "up", "down"]) {
        let mut head = record(
            timestamp_ns + i,
            MUL_MAT_ID,
            &format!("ffn_moe_{projection}-{layer}"),
        );
        read_tensor(
            &mut head,
            gguf,
            &format!("blk.{layer}.ffn_{projection}_exps.weight"),
        );
        read_buffer(&mut head, &format!("ffn_norm-{layer}"), 7, 1024);
        read_buffer(&mut head, &format!("ffn_moe_topk-{layer}"), 8, 64);
        records.extend(expert_operation(&head, layer, first_token, tokens));
    }
    records
}
