//! Comparisons of synthetic runs with known differences.

#[path = "../../../../moe-trace/tests/it/common.rs"]
mod common;
mod operations;
mod routing;
mod runs;

use std::path::Path;

use common::{expert_layer, gpt_oss, manifest, read_buffer, read_tensor, record, run_of};
use moe_analysis::diff::{
    DiffOptions, DiffReport, LayerBytes, LayerRouting, ManifestDifference, RangeDifferenceKind,
    RoutingDifferenceKind, SourceAspect, diff,
};
use moe_gguf::Gguf;
use moe_trace::ops::{GET_ROWS, MUL_MAT};
use moe_trace::record::{EXT_NONE, PHASE_GENERATE, PHASE_PROMPT, set_name};
use moe_trace::{LayerId, Manifest, NO_LAYER, Run, RunOptions, RunWriter, TensorAccessLog};

/// One pass over layers 0 and 1 with the experts of each token by layer. Layer 1 routes only the last tokens, one for each
/// of its lists of experts.
fn pass(
    gguf: &Gguf,
    clock: u64,
    phase: u8,
    first_token: u32,
    layers: [&[&[i32]]; 2],
) -> Vec<TensorAccessLog> {
    let mut embedding = record(clock, GET_ROWS, "embd");
    read_tensor(&mut embedding, gguf, "token_embd.weight");
    embedding.n_tokens.set(layers[0].len() as u32);
    embedding.token_id.set(first_token);
    let mut records = vec![embedding];
    let behind = first_token + layers[0].len() as u32;
    for (layer, tokens) in (0u16..).zip(layers) {
        let first = behind - tokens.len() as u32;
        let at = clock + 10 * (u64::from(layer) + 1);
        records.extend(expert_layer(gguf, at, layer, first, tokens));
    }
    let mut output = record(clock + 90, MUL_MAT, "result_output");
    output.token_id.set(behind - 1);
    read_tensor(&mut output, gguf, "output.weight");
    read_buffer(&mut output, "result_norm", 9, 256);
    records.push(output);
    for record in &mut records {
        record.phase = phase;
        for source in &mut record.sources {
            let layer = source
                .name()
                .strip_prefix("blk.")
                .and_then(|rest| rest[..1].parse().ok());
            source.layer_id.set(layer.unwrap_or(NO_LAYER));
        }
    }
    records
}

/// A prompt of three tokens, of which layer 1 routes only the last, and two generated tokens.
fn known() -> Vec<TensorAccessLog> {
    let (gguf, _) = gpt_oss();
    let prompt: [&[&[i32]]; 2] = [
        &[&[0, 1, 2, 3], &[4, 5, 6, 7], &[8, 9, 10, 11]],
        &[&[3, 2, 1, 0]],
    ];
    let third: [&[&[i32]]; 2] = [&[&[0, 1, 2, 3]], &[&[4, 5, 6, 7]]];
    let fourth: [&[&[i32]]; 2] = [&[&[0, 2, 4, 6]], &[&[3, 2, 1, 0]]];
    [
        pass(&gguf, 100, PHASE_PROMPT, 0, prompt),
        pass(&gguf, 200, PHASE_GENERATE, 3, third),
        pass(&gguf, 300, PHASE_GENERATE, 4, fourth),
    ]
    .concat()
}

/// Compares the known records with modified ones.
fn changed(options: &DiffOptions, change: impl FnOnce(&mut Vec<TensorAccessLog>)) -> DiffReport {
    let dir = tempfile::tempdir().unwrap();
    let mut records = known();
    let a = run_of(&dir.path().join("a"), &records);
    change(&mut records);
    let b = run_of(&dir.path().join("b"), &records);
    diff(&a, &b, options).unwrap()
}

/// Records of the expert operations of a token in a layer.
fn of_token(
    records: &mut [TensorAccessLog],
    token: u32,
    layer: u16,
) -> impl Iterator<Item = &mut TensorAccessLog> {
    records.iter_mut().filter(move |r| {
        r.num_experts > 0 && r.token_id.get() == token && r.layer() == Some(LayerId(layer))
    })
}

fn named<'r>(records: &'r mut [TensorAccessLog], name: &str) -> Vec<&'r mut TensorAccessLog> {
    let name = name.as_bytes();
    records
        .iter_mut()
        .filter(|r| r.dst_name_bytes() == name)
        .collect()
}

/// Size of one of the 16 experts of a tensor.
fn expert_bytes(tensor: &str) -> u64 {
    let (gguf, _) = gpt_oss();
    gguf.tensor(tensor).unwrap().size_bytes / 16
}

#[test]
fn run_equals_itself() {
    let report = changed(&DiffOptions::default(), |_| {});
    assert!(report.is_equal(), "{report:?}");
    assert_eq!(report.manifest, []);
    let routing = report.routing.unwrap();
    // Layer 0 routes three prompt and two generated tokens, layer 1 one and two. Each token has four experts.
    assert_eq!(routing.layers[&LayerId(0)].tokens, [5, 5]);
    assert_eq!(routing.layers[&LayerId(1)].tokens, [3, 3]);
    assert_eq!(routing.total().weight_differences, (0.0, 32));
    assert_eq!(routing.total().share_same_experts(), Some(1.0));
    // Each of three passes: embeddings, gate, up and down of two layers, output.
    assert_eq!(report.operations.unwrap().n, [24, 24]);
    let bytes = report.bytes.unwrap();
    assert!(bytes.split_experts);
    // Experts 0 to 11 of layer 0 and 0 to 7 of layer 1 in three tensors; embeddings and output.
    let ranges = |layer: Option<u16>| bytes.layers[&layer.map(LayerId)].ranges;
    assert_eq!(ranges(Some(0)), [36, 36]);
    assert_eq!(ranges(Some(1)), [24, 24]);
    assert_eq!(ranges(None), [2, 2]);
}

#[test]
fn bytes_read_count_selected_experts() {
    let report = changed(&DiffOptions::default(), |_| {});
    let bytes = report.bytes.unwrap();
    let size: u64 = ["gate", "up", "down"]
        .iter()
        .map(|projection| expert_bytes(&format!("blk.1.ffn_{projection}_exps.weight")))
        .sum();
    // Layer 1: three passes of one token with four experts.
    assert_eq!(bytes.layers[&Some(LayerId(1))].read, [12 * size, 12 * size]);
}
