//! The values of all columns of the tables.

use std::fs;

use arrow::array::{Array, AsArray};
use arrow::datatypes::Float32Type;
use moe_trace::ops::{ADD_ID, GET_ROWS, MUL_MAT, MUL_MAT_ID};
use moe_trace::record::{EXT_NONE, FLAG_CPU_FALLBACK, PHASE_GENERATE};
use moe_trace::tables::{TableOptions, TableSummary, read_routing, write_tables};
use moe_trace::{ExpertId, NO_TENSOR, Phase, Run};
use zerocopy::IntoBytes;

use super::common::*;
use super::read_tables::{ints, names, read, tables_of};

#[test]
fn ops_has_one_row_for_each_operation() {
    let (gguf, _) = gpt_oss();
    let mut embedding = record(100, GET_ROWS, "inp_embd");
    read_tensor(&mut embedding, &gguf, "token_embd.weight");
    embedding.n_tokens.set(2);
    let mut records = vec![embedding];
    records.extend(expert_layer(&gguf, 200, 1, 0, &[&[3, 1], &[1, 2]]));
    let mut last = record(300, 200, "result_output");
    last.phase = PHASE_GENERATE;
    last.flags = FLAG_CPU_FALLBACK;
    last.thread_id.set(3);
    last.sequence_id.set(8);
    last.token_id.set(2);
    last.duration_ns.set(0);
    records.push(last);
    let mut plain = record(400, MUL_MAT, "plain");
    plain.ext_version = EXT_NONE;
    records.push(plain);

    let (tmp, summary) = tables_of(&records);
    assert_eq!((summary.records, summary.ops), (9, 6));
    let ops = read(&tmp.path().join("ops.parquet"));
    assert_eq!(ints(&ops, "op_index"), [0, 1, 2, 3, 4, 5]);
    assert_eq!(ints(&ops, "timestamp_ns"), [100, 200, 201, 202, 300, 400]);
    assert_eq!(
        ints(&ops, "duration_ns"),
        [500, 500, 500, 500, -1, -1],
        "null for 0 and for records without extension"
    );
    assert_eq!(ints(&ops, "token_id"), [0, 0, 0, 0, 2, 0]);
    assert_eq!(ints(&ops, "sequence_id"), [0, 0, 0, 0, 8, -1]);
    assert_eq!(ints(&ops, "layer_id"), [-1, 1, 1, 1, -1, -1]);
    assert_eq!(ints(&ops, "thread_id"), [0, 0, 0, 0, 3, 0]);
    assert_eq!(ints(&ops, "n_tokens"), [2, 2, 2, 2, 1, -1]);
    assert_eq!(ints(&ops, "num_sources"), [1, 3, 3, 3, 0, 0]);
    assert_eq!(ints(&ops, "cpu_fallback"), [0, 0, 0, 0, 1, 0]);
    assert_eq!(
        names(&ops, "phase"),
        ["PROMPT", "PROMPT", "PROMPT", "PROMPT", "GENERATE", "PROMPT"]
    );
    assert_eq!(
        names(&ops, "op"),
        [
            "GET_ROWS",
            "MUL_MAT_ID",
            "MUL_MAT_ID",
            "MUL_MAT_ID",
            "op_200",
            "MUL_MAT"
        ]
    );
    let dst = [
        "inp_embd",
        "ffn_moe_gate-1",
        "ffn_moe_up-1",
        "ffn_moe_down-1",
        "result_output",
        "plain",
    ];
    assert_eq!(names(&ops, "dst_name"), dst);
}

#[test]
fn accesses_has_each_expert_of_an_operation_once() {
    let (gguf, map) = gpt_oss();
    let mut records = expert_layer(&gguf, 200, 1, 0, &[&[3, 1], &[1, 15]]);
    records.truncate(2); // gate alone
    let mut bias = record(210, ADD_ID, "ffn_moe_gate_biased-1");
    read_buffer(&mut bias, "ffn_moe_gate-1", 9, 100);
    read_tensor(&mut bias, &gguf, "blk.1.ffn_gate_exps.bias");
    records.extend(expert_operation(&bias, 1, 0, &[&[3, 1], &[1, 15]]));
    let mut dense = record(220, MUL_MAT, "attn-1");
    read_tensor(&mut dense, &gguf, "blk.1.attn_q.weight");
    // The range is larger than any tensor, so the map does not resolve it.
    dense.sources[0].tensor_idx.set(NO_TENSOR);
    dense.source_file[0].set(2);
    dense.set_source_size(0, 5 << 32);
    records.push(dense);

    let (tmp, _) = tables_of(&records);
    let accesses = read(&tmp.path().join("accesses.parquet"));
    assert_eq!(ints(&accesses, "op_index"), [0, 0, 0, 0, 0, 1, 1, 1, 1, 2]);
    assert_eq!(ints(&accesses, "source"), [0, 0, 0, 1, 2, 0, 1, 1, 1, 0]);
    assert_eq!(
        ints(&accesses, "expert_id"),
        [1, 3, 15, -1, -1, -1, 1, 3, 15, -1]
    );
    assert_eq!(ints(&accesses, "file"), [0, 0, 0, -1, -1, -1, 0, 0, 0, 2]);
    assert_eq!(
        ints(&accesses, "buffer_id"),
        [-1, -1, -1, 7, 8, 9, -1, -1, -1, -1]
    );
    let sources: Vec<_> = names(&accesses, "memory_source");
    assert_eq!(
        sources,
        [
            "DISK", "DISK", "DISK", "BUFFER", "BUFFER", "BUFFER", "DISK", "DISK", "DISK", "DISK"
        ]
    );
    assert_eq!(names(&accesses, "tensor")[0], "blk.1.ffn_gate_exps.weight");
    assert_eq!(names(&accesses, "tensor")[3], "ffn_norm-1");

    let (offset, size) = (
        ints(&accesses, "file_offset"),
        ints(&accesses, "size_bytes"),
    );
    let expert = |id| {
        map.rows
            .iter()
            .find(|row| {
                &*row.tensor == "blk.1.ffn_gate_exps.weight" && row.expert_id == Some(ExpertId(id))
            })
            .unwrap()
    };
    for (row, id) in [(0, 1), (1, 3), (2, 15)] {
        assert_eq!(
            (offset[row] as u64, size[row] as u64),
            (expert(id).file_offset, expert(id).size_bytes)
        );
    }
    // An expert has one row of a bias [n_ff, n_expert] of type F32.
    let bias = gguf.tensor("blk.1.ffn_gate_exps.bias").unwrap();
    let row_size = bias.ne[0] * 4;
    assert_eq!(bias.size_bytes, row_size * 16);
    for (row, id) in [(6, 1), (7, 3), (8, 15)] {
        assert_eq!(
            (offset[row] as u64, size[row] as u64),
            (bias.offset + id * row_size, row_size)
        );
    }
    assert_eq!((offset[3], size[3]), (-1, 1024));
    let dense = gguf.tensor("blk.1.attn_q.weight").unwrap();
    assert_eq!(
        (offset[9] as u64, size[9]),
        (dense.offset, 5 << 32),
        "the record's size, also above 4 GiB"
    );
}

#[test]
fn routing_has_each_selected_expert_once() {
    let (gguf, _) = gpt_oss();
    let mut records = Vec::new();
    records.extend(expert_layer(&gguf, 100, 0, 0, &[&[3, 1], &[1, 2]]));
    records.extend(expert_layer(&gguf, 200, 1, 0, &[&[0, 9], &[9, 8]]));
    let mut decode = expert_layer(&gguf, 300, 0, 2, &[&[7, 6]]);
    decode.extend(expert_layer(&gguf, 400, 1, 2, &[&[5, 4]]));
    for record in &mut decode {
        record.phase = PHASE_GENERATE;
        record.sequence_id.set(3);
        record.expert_lane[1] = 0;
    }
    records.extend(decode);

    let (tmp, summary) = tables_of(&records);
    assert_eq!(summary.routing, 12);
    let routing = read(&tmp.path().join("routing.parquet"));
    assert_eq!(
        ints(&routing, "token_id"),
        [0, 0, 1, 1, 0, 0, 1, 1, 2, 2, 2, 2]
    );
    assert_eq!(
        ints(&routing, "layer_id"),
        [0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 1, 1]
    );
    assert_eq!(ints(&routing, "slot"), [0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1]);
    assert_eq!(
        ints(&routing, "expert_id"),
        [3, 1, 1, 2, 0, 9, 9, 8, 7, 6, 5, 4]
    );
    assert_eq!(
        ints(&routing, "sequence_id"),
        [0, 0, 0, 0, 0, 0, 0, 0, 3, 3, 3, 3]
    );
    assert_eq!(
        ints(&routing, "timestamp_ns"),
        [100, 100, 100, 100, 200, 200, 200, 200, 300, 300, 400, 400]
    );
    assert_eq!(names(&routing, "phase")[7..9], ["PROMPT", "GENERATE"]);
    assert_eq!(names(&routing, "lane")[7..10], ["cpu", "cpu", "-"]);
    let weight = routing
        .column_by_name("weight")
        .unwrap()
        .as_primitive::<Float32Type>();
    assert_eq!(weight.values()[..4], [1.0, 0.5, 1.0, 0.5]);

    // The reader and the run return the same values.
    let batches: Vec<_> = read_routing(tmp.path())
        .unwrap()
        .map(Result::unwrap)
        .collect();
    assert_eq!(batches.len(), 1);
    assert_eq!(batches[0].expert_id(), [3, 1, 1, 2, 0, 9, 9, 8, 7, 6, 5, 4]);
    let phases = [
        [Some(Phase::Prompt); 8].as_slice(),
        &[Some(Phase::Generate); 4],
    ]
    .concat();
    assert_eq!(batches[0].phase(), phases);
    assert_eq!(batches[0].lane()[7..10], [1, 1, 0]);
    assert_eq!(batches[0].sequence_id().value(11), 3);
    let run = Run::open(tmp.path().join("run")).unwrap();
    let operations: Vec<_> = run
        .routing()
        .map(|op| op.head().dst_name().into_owned())
        .collect();
    assert_eq!(
        operations,
        [
            "ffn_moe_gate-0",
            "ffn_moe_gate-1",
            "ffn_moe_gate-0",
            "ffn_moe_gate-1"
        ]
    );
}

#[test]
fn joins_more_than_sixteen_experts_of_a_token() {
    let (gguf, _) = gpt_oss();
    let ids: Vec<i32> = (0..16).rev().chain(0..4).collect();
    let records = expert_layer(&gguf, 100, 0, 0, &[&ids, &ids]);
    let (tmp, summary) = tables_of(&records);
    assert_eq!(
        summary,
        TableSummary {
            records: 12,
            ops: 3,
            accesses: 3 * (16 + 2),
            routing: 40
        }
    );
    let routing = read(&tmp.path().join("routing.parquet"));
    assert_eq!(ints(&routing, "slot")[..20], (0..20).collect::<Vec<_>>());
    assert_eq!(ints(&routing, "token_id")[19..21], [0, 1]);
}

#[test]
fn counts_a_layer_once_in_a_pass_for_any_projection_names() {
    let head = |timestamp, name: &str| record(timestamp, MUL_MAT_ID, name);
    let op = |timestamp, name: &str, layer, experts: &[i32]| {
        expert_operation(&head(timestamp, name), layer, 0, &[experts])[0]
    };
    // Fused gate and up; then a model without a gate, with experts in one layer only, three passes.
    let fused = [
        op(1, "ffn_moe_gate_up-0", 0, &[1]),
        op(2, "ffn_moe_down-0", 0, &[1]),
        op(3, "ffn_moe_gate_up-1", 1, &[2]),
        op(4, "ffn_moe_down-1", 1, &[2]),
    ];
    let single: Vec<_> = (0..3)
        .flat_map(|i| {
            [
                op(10 + 2 * i, "ffn_moe_up-0", 0, &[i as i32]),
                op(11 + 2 * i, "ffn_moe_down-0", 0, &[i as i32]),
            ]
        })
        .collect();
    for (records, experts) in [(&fused[..], vec![1, 2]), (&single, vec![0, 1, 2])] {
        let (tmp, _) = tables_of(records);
        assert_eq!(
            ints(&read(&tmp.path().join("routing.parquet")), "expert_id"),
            experts
        );
    }
}

#[test]
fn accesses_of_a_bare_trace_are_entire_tensors() {
    let tmp = tempfile::tempdir().unwrap();
    let (gguf, _) = gpt_oss();
    let trace = tmp.path().join("trace.bin");
    let mut records = expert_layer(&gguf, 1, 0, 0, &[&[4, 5]]);
    records[0].ext_version = EXT_NONE;
    fs::write(&trace, records.as_bytes()).unwrap();
    let run = Run::open(&trace).unwrap();
    write_tables(&run, tmp.path(), TableOptions::default()).unwrap();
    let accesses = read(&tmp.path().join("accesses.parquet"));
    let tensor = gguf.tensor("blk.0.ffn_gate_exps.weight").unwrap();
    assert_eq!(ints(&accesses, "expert_id")[0], -1);
    assert_eq!(ints(&accesses, "file_offset")[0] as u64, tensor.offset);
    assert_eq!(ints(&accesses, "size_bytes")[0] as u64, tensor.size_bytes);
    let routing = read(&tmp.path().join("routing.parquet"));
    assert_eq!(ints(&routing, "expert_id"), [4, 5]);
    for column in ["weight", "lane", "sequence_id"] {
        assert_eq!(
            routing.column_by_name(column).unwrap().logical_null_count(),
            2,
            "{column} is missing in records without extension"
        );
    }
}
