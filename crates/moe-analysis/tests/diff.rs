//! Differences of runs that are known because they were made.

#[path = "../../moe-trace/tests/common/mod.rs"]
mod common;

use std::path::Path;

use common::tables::run_of;
use common::{expert_layer, gpt_oss, manifest, read_buffer, read_tensor, record};
use moe_analysis::diff::{
    Fact, LayerBytes, LayerRouting, Options, RangeKind, Report, RowKind, SourceAspect, diff,
};
use moe_gguf::Gguf;
use moe_trace::ops::{GET_ROWS, MUL_MAT};
use moe_trace::record::{PHASE_GENERATE, PHASE_PROMPT, set_name};
use moe_trace::{Manifest, NO_LAYER, Run, RunOptions, RunWriter, TensorAccessLog};

/// One pass over layers 0 and 1: the experts of each token by layer. Layer 1 goes over the last tokens, as many as it has
/// experts for.
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

/// A prompt of three tokens, of which layer 1 routes the last alone, and two generated tokens.
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

/// Compares the known records with changed ones.
fn changed(options: &Options, change: impl FnOnce(&mut Vec<TensorAccessLog>)) -> Report {
    let dir = tempfile::tempdir().unwrap();
    let mut records = known();
    let a = run_of(&dir.path().join("a"), &records);
    change(&mut records);
    let b = run_of(&dir.path().join("b"), &records);
    diff(&a, &b, options).unwrap()
}

/// The records of the expert operations of a token in a layer.
fn of_token(
    records: &mut [TensorAccessLog],
    token: u32,
    layer: u16,
) -> impl Iterator<Item = &mut TensorAccessLog> {
    records
        .iter_mut()
        .filter(move |r| r.num_experts > 0 && r.token_id.get() == token && r.layer() == Some(layer))
}

fn named<'r>(records: &'r mut [TensorAccessLog], name: &str) -> Vec<&'r mut TensorAccessLog> {
    let name = name.as_bytes();
    records
        .iter_mut()
        .filter(|r| r.dst_name_bytes() == name)
        .collect()
}

/// Bytes of one of the 16 experts of a tensor.
fn expert_bytes(tensor: &str) -> u64 {
    let (gguf, _) = gpt_oss();
    gguf.tensor(tensor).unwrap().size_bytes / 16
}

#[test]
fn a_run_equals_itself() {
    let report = changed(&Options::default(), |_| {});
    assert!(report.is_equal(), "{report:?}");
    assert_eq!(report.manifest, []);
    let routing = report.routing.unwrap();
    // Layer 0 routes three prompt and two generated tokens, layer 1 one and two; four experts each.
    assert_eq!(routing.layers[&0].rows, [5, 5]);
    assert_eq!(routing.layers[&1].rows, [3, 3]);
    assert_eq!(routing.total().weight_differences, (0.0, 32));
    assert_eq!(routing.total().share_same_experts(), Some(1.0));
    // Each of three passes: embeddings, two layers of gate, up and down, output.
    assert_eq!(report.operations.unwrap().n, [24, 24]);
    let bytes = report.bytes.unwrap();
    assert!(bytes.split_experts);
    // The experts 0 to 11 of layer 0 and 0 to 7 of layer 1, of three tensors; embeddings and output.
    let ranges = |layer: Option<u16>| bytes.layers[&layer].ranges;
    assert_eq!(ranges(Some(0)), [36, 36]);
    assert_eq!(ranges(Some(1)), [24, 24]);
    assert_eq!(ranges(None), [2, 2]);
}

#[test]
fn bytes_read_are_those_of_the_experts_chosen() {
    let report = changed(&Options::default(), |_| {});
    let bytes = report.bytes.unwrap();
    let size: u64 = ["gate", "up", "down"]
        .iter()
        .map(|projection| expert_bytes(&format!("blk.1.ffn_{projection}_exps.weight")))
        .sum();
    // Layer 1: three passes of one token with four experts.
    assert_eq!(bytes.layers[&Some(1)].read, [12 * size, 12 * size]);
}

#[test]
fn another_order_of_the_same_experts() {
    let report = changed(&Options::default(), |records| {
        for record in of_token(records, 1, 0) {
            record.expert_ids.swap(0, 1);
        }
    });
    let routing = report.routing.unwrap();
    let layer = &routing.layers[&0];
    assert_eq!(
        (layer.other_order, layer.other_experts, layer.other_weights),
        (1, 0, 0)
    );
    // The weights, 1 and 1/2, did not move with the ids 4 and 5: two of 20 are apart by 1/2.
    assert_eq!(layer.max_weight_difference, 0.5);
    assert_eq!(layer.mean_weight_difference(), Some(0.05));
    assert!(routing.layers[&1].is_equal());
    let row = &routing.first[..];
    assert_eq!(row.len(), 1);
    assert_eq!(
        (row[0].kind, row[0].token_id, row[0].layer),
        (RowKind::Order, 1, 0)
    );
    let ids = |side: usize| {
        row[0].experts[side]
            .iter()
            .map(|e| e.expert_id)
            .collect::<Vec<_>>()
    };
    assert_eq!((ids(0), ids(1)), (vec![4, 5, 6, 7], vec![5, 4, 6, 7]));
    assert!(report.operations.unwrap().is_equal());
    assert!(report.bytes.unwrap().is_equal());
}

#[test]
fn another_expert_is_other_bytes_too() {
    let report = changed(&Options::default(), |records| {
        for record in of_token(records, 4, 1) {
            record.expert_ids[0].set(9);
        }
    });
    let routing = report.routing.unwrap();
    assert_eq!(routing.layers[&1].other_experts, 1);
    assert_eq!(routing.layers[&1].share_same_experts(), Some(2.0 / 3.0));
    assert_eq!(routing.total().share_same_experts(), Some(7.0 / 8.0));
    assert_eq!(routing.first[0].kind, RowKind::Experts);
    assert_eq!(routing.first[0].phase, PHASE_GENERATE);
    let bytes = report.bytes.unwrap();
    let layer = bytes.layers[&Some(1)];
    // Three tensors: expert 9 was read by B alone, expert 3 twice by A and once by B.
    assert_eq!((layer.only, layer.other_reads), ([0, 3], 3));
    let found = bytes
        .first
        .iter()
        .find(|r| r.kind == RangeKind::OnlyB)
        .unwrap();
    assert_eq!((found.expert_id, found.layer), (Some(9), Some(1)));
    let (gguf, _) = gpt_oss();
    let tensor = gguf.tensor(&found.tensor).unwrap();
    let reads = found.reads[1].unwrap();
    assert_eq!(reads.size_bytes, tensor.size_bytes / 16);
    assert_eq!(
        reads.file_offset,
        tensor.offset + 9 * (tensor.size_bytes / 16)
    );
    let other = bytes
        .first
        .iter()
        .find(|r| r.kind == RangeKind::Reads)
        .unwrap();
    assert_eq!(other.expert_id, Some(3));
    assert_eq!(other.reads.map(|reads| reads.unwrap().n), [2, 1]);
}

#[test]
fn weights_are_compared_up_to_a_tolerance() {
    let change = |records: &mut Vec<TensorAccessLog>| {
        for record in of_token(records, 3, 0) {
            record.expert_weights[2].set(1.0 / 3.0 + 0.25);
        }
    };
    let routing = changed(&Options::default(), change).routing.unwrap();
    assert_eq!(routing.layers[&0].other_weights, 1);
    assert_eq!(routing.first[0].kind, RowKind::Weights);
    assert!((routing.layers[&0].max_weight_difference - 0.25).abs() < 1e-6);
    let options = Options {
        weight_tolerance: 0.26,
        ..Options::default()
    };
    assert!(changed(&options, change).is_equal());
    // What is no number is no weight that is close.
    let nan = |records: &mut Vec<TensorAccessLog>| {
        of_token(records, 3, 0).for_each(|record| record.expert_weights[2].set(f32::NAN));
    };
    let routing = changed(&options, nan).routing.unwrap();
    assert_eq!(routing.layers[&0].max_weight_difference, f64::INFINITY);
}

#[test]
fn a_missing_operation_and_another_name() {
    let report = changed(&Options::default(), |records| {
        let at = records
            .iter()
            .rposition(|r| r.dst_name_bytes() == b"result_output");
        records.remove(at.unwrap());
        for record in named(records, "ffn_moe_up-1") {
            set_name(&mut record.dst_name, "ffn_up-1");
        }
    });
    let operations = report.operations.unwrap();
    assert_eq!(operations.n, [24, 23]);
    let kinds = |side: usize| -> Vec<(&str, &str, u64)> {
        let sorted = operations.only[side].sorted().into_iter();
        sorted
            .map(|((op, name), n)| (op.as_str(), name.as_str(), n))
            .collect()
    };
    assert_eq!(
        kinds(0),
        [
            ("MUL_MAT_ID", "ffn_moe_up-N", 3),
            ("MUL_MAT", "result_output", 1)
        ]
    );
    assert_eq!(kinds(1), [("MUL_MAT_ID", "ffn_up-N", 3)]);
    assert_eq!((operations.n_other_sources, operations.other_order), (0, 0));
    // Gate tells the routing.
    assert!(report.routing.unwrap().is_equal());
}

/// llama.cpp names a node that it has no name for by its place in the graph.
#[test]
fn nodes_without_a_name_match_by_operation() {
    let unname = |records: &mut Vec<TensorAccessLog>| {
        for (i, record) in named(records, "ffn_moe_up-1").into_iter().enumerate() {
            set_name(&mut record.dst_name, &format!("node_{}", 31 + i));
        }
        for record in named(records, "ffn_moe_down-1") {
            set_name(&mut record.sources[1].name, "node_40 (reshaped)");
        }
    };
    let operations = changed(&Options::default(), unname).operations.unwrap();
    assert!(operations.is_equal(), "{operations:?}");

    // Not with another operation.
    let operations = changed(&Options::default(), |records| {
        for record in named(records, "result_output") {
            record.operation_type = GET_ROWS;
            set_name(&mut record.dst_name, "node_7");
        }
    });
    let operations = operations.operations.unwrap();
    assert_eq!(operations.only[0].sorted()[0].0.1, "result_output");
    assert_eq!(
        operations.only[1].sorted(),
        [(&("GET_ROWS".into(), "node_N".into()), 3)]
    );
}

#[test]
fn operations_in_another_order() {
    let report = changed(&Options::default(), |records| {
        let at = records
            .iter()
            .rposition(|r| r.dst_name_bytes() == b"ffn_moe_up-1")
            .unwrap();
        records.swap(at, at + 1); // up and down of the last pass, one record each
    });
    let operations = report.operations.unwrap();
    assert_eq!((operations.only[0].n, operations.only[1].n), (0, 0));
    assert_eq!(operations.other_order, 1);
    assert!(!operations.is_equal());
}

#[test]
fn other_sources_of_matched_operations() {
    let report = changed(&Options::default(), |records| {
        for record in named(records, "result_output") {
            set_name(&mut record.sources[1].name, "norm");
            record.n_tokens.set(2);
        }
        for record in named(records, "ffn_moe_down-1") {
            record.set_source_size(1, 1);
            record.num_sources = 2;
        }
    });
    let operations = report.operations.unwrap();
    assert_eq!(operations.n_other_sources, 6);
    let found: Vec<_> = operations
        .sources
        .iter()
        .map(|(s, n)| {
            (
                s.dst_name.as_str(),
                s.what,
                s.a.as_deref(),
                s.b.as_deref(),
                *n,
            )
        })
        .collect();
    assert_eq!(
        found,
        [
            (
                "result_output",
                SourceAspect::Tokens,
                Some("1"),
                Some("2"),
                3
            ),
            (
                "result_output",
                SourceAspect::Name(1),
                Some("result_norm"),
                Some("norm"),
                3
            ),
            (
                "ffn_moe_down-N",
                SourceAspect::Name(2),
                Some("ffn_moe_topk-1"),
                None,
                3
            ),
            ("ffn_moe_down-N", SourceAspect::Size(1), None, None, 3),
        ]
    );
    assert!(report.bytes.unwrap().is_equal());
}

#[test]
fn another_place_and_another_size() {
    let report = changed(&Options::default(), |records| {
        for record in named(records, "ffn_moe_gate-0") {
            let offset = record.sources[0].offset_or_buffer_id.get();
            record.sources[0].offset_or_buffer_id.set(offset + 32);
        }
        // One of three reads of the output has another size.
        let at = records
            .iter()
            .rposition(|r| r.dst_name_bytes() == b"result_output")
            .unwrap();
        let size = records[at].source_size(0);
        records[at].set_source_size(0, size - 2);
    });
    let bytes = report.bytes.unwrap();
    // Twelve experts of one of the three tensors lie elsewhere.
    assert_eq!(
        bytes.layers[&Some(0)],
        LayerBytes {
            other_place: 12,
            ..clean(&bytes.layers[&Some(0)])
        }
    );
    let output = bytes.layers[&None];
    assert_eq!((output.only, output.other_reads), ([0, 1], 1));
    assert_eq!(output.read[1], output.read[0] - 2);
    assert!(report.routing.unwrap().is_equal());
    let report = changed(&Options::default(), |records| {
        for record in named(records, "result_output") {
            record.set_source_size(0, 100);
        }
    });
    let bytes = report.bytes.unwrap();
    assert_eq!(bytes.layers[&None].other_size, 1);
    let sizes = bytes.first[0].reads.map(|reads| reads.unwrap().size_bytes);
    let (gguf, _) = gpt_oss();
    assert_eq!(
        sizes,
        [gguf.tensor("output.weight").unwrap().size_bytes, 100]
    );
}

/// The same reads without any difference.
fn clean(layer: &LayerBytes) -> LayerBytes {
    LayerBytes {
        read: layer.read,
        ranges: layer.ranges,
        ..LayerBytes::default()
    }
}

#[test]
fn rows_of_one_run_alone() {
    let report = changed(&Options::default(), |records| {
        records.retain(|r| r.token_id.get() < 4);
    });
    let routing = report.routing.unwrap();
    let total = routing.total();
    assert_eq!(
        (total.rows, total.only, total.in_both()),
        ([8, 6], [2, 0], 6)
    );
    assert_eq!(total.share_same_experts(), Some(1.0));
    assert_eq!(routing.first.len(), 2);
    assert!(
        routing
            .first
            .iter()
            .all(|row| row.kind == RowKind::OnlyA && row.experts[1].is_empty())
    );
    assert_eq!(report.operations.unwrap().only[0].n, 8);
}

#[test]
fn batches_and_interleaved_sequences_do_not_matter_to_routing() {
    let (gguf, _) = gpt_oss();
    let dir = tempfile::tempdir().unwrap();
    let all: &[&[i32]] = &[&[0, 1, 2, 3], &[4, 5, 6, 7], &[8, 9, 10, 11]];
    let whole = pass(&gguf, 100, PHASE_PROMPT, 0, [all, all]);
    let halves = [
        pass(&gguf, 100, PHASE_PROMPT, 0, [&all[..2], &all[..2]]),
        pass(&gguf, 200, PHASE_PROMPT, 2, [&all[2..], &all[2..]]),
    ]
    .concat();
    let a = run_of(&dir.path().join("a"), &whole);
    let b = run_of(&dir.path().join("b"), &halves);
    let report = diff(&a, &b, &Options::default()).unwrap();
    let routing = report.routing.unwrap();
    assert!(routing.is_equal());
    assert_eq!(routing.total().rows, [6, 6]);
    // The second pass of B has no match.
    let operations = report.operations.unwrap();
    assert_eq!((operations.only[1].n, operations.other_order), (8, 0));

    let other = |sequence: u32, records: &[TensorAccessLog]| {
        let mut records = records.to_vec();
        records
            .iter_mut()
            .for_each(|record| record.sequence_id.set(sequence));
        records
    };
    let [first, second] = [0, 1].map(|sequence| other(sequence, &known()));
    let passes = |records: &[TensorAccessLog]| -> Vec<Vec<TensorAccessLog>> {
        let by_token = |t: std::ops::Range<u32>| {
            records
                .iter()
                .filter(|r| t.contains(&r.token_id.get()))
                .copied()
                .collect()
        };
        vec![by_token(0..3), by_token(3..4), by_token(4..5)]
    };
    let in_turn: Vec<TensorAccessLog> = passes(&first)
        .into_iter()
        .zip(passes(&second))
        .flat_map(|(a, b)| [a, b].concat())
        .collect();
    let a = run_of(&dir.path().join("c"), &[first, second].concat());
    let b = run_of(&dir.path().join("d"), &in_turn);
    assert!(diff(&a, &b, &Options::default()).unwrap().is_equal());
}

#[test]
fn numbers_of_operations_may_differ() {
    let dir = tempfile::tempdir().unwrap();
    let records = known();
    let a = run_of(&dir.path().join("a"), &records);
    let b = moved_numbers(&dir.path().join("b"), &records);
    let report = diff(&a, &b, &Options::default()).unwrap();
    assert!(report.is_equal(), "{report:?}");
    let fact = Fact {
        name: "engine",
        a: Some("moe-analyze 0.1.0".into()),
        b: Some("other 7".into()),
    };
    assert_eq!(report.manifest, [fact]);
}

/// The records as another engine numbers its operations.
fn moved_numbers(dir: &Path, records: &[TensorAccessLog]) -> Run {
    let (_, map) = gpt_oss();
    let mut manifest = Manifest {
        ops: moe_trace::ops::default_table()
            .iter()
            .map(|(n, name)| (n + 7, name.to_owned()))
            .collect(),
        ..manifest()
    };
    manifest.engine.name = "other".into();
    manifest.engine.version = "7".into();
    let mut writer = RunWriter::create(dir, manifest, &map, RunOptions::default()).unwrap();
    for record in records {
        let mut record = *record;
        record.operation_type += 7;
        *writer.next_record().unwrap() = record;
    }
    writer.finish().unwrap();
    Run::open(dir).unwrap()
}

#[test]
fn bare_traces_name_whole_tensors() {
    let dir = tempfile::tempdir().unwrap();
    let a = run_of(&dir.path().join("a"), &known());
    let b = Run::open(dir.path().join("a/trace.bin")).unwrap();
    let report = diff(&a, &b, &Options::default()).unwrap();
    assert!(report.is_equal());
    assert!(
        report
            .manifest
            .iter()
            .all(|fact| fact.a.is_some() && fact.b.is_none())
    );
    let bytes = report.bytes.unwrap();
    assert!(!bytes.split_experts);
    assert_eq!(bytes.layers[&Some(1)].ranges, [3, 3]);
}

#[test]
fn parts_and_limits() {
    let options = Options {
        operations: false,
        bytes: false,
        limit: 2,
        ..Options::default()
    };
    let report = changed(&options, |records| {
        for record in records.iter_mut().filter(|r| r.num_experts > 0) {
            record.expert_ids[3].set(15);
        }
    });
    assert_eq!((report.operations, report.bytes), (None, None));
    let routing = report.routing.unwrap();
    assert_eq!((routing.total().other_experts, routing.first.len()), (8, 2));
    assert_eq!(LayerRouting::default().share_same_experts(), None);
}
