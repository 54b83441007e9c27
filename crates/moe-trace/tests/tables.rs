//! The tables of a run, read back with their right values.

mod common;

use std::fs::{self, File};
use std::num::NonZero;
use std::path::Path;

use arrow::array::{Array, AsArray, RecordBatch};
use arrow::compute::{cast, concat_batches};
use arrow::datatypes::{DataType, Float32Type, UInt64Type};
use common::*;
use moe_trace::ops::{ADD_ID, GET_ROWS, MUL_MAT, MUL_MAT_ID};
use moe_trace::record::{EXT_NONE, FLAG_CPU_FALLBACK, PHASE_GENERATE};
use moe_trace::tables::{TableOptions, TableSummary, add_to_dataset, read_routing, write_tables};
use moe_trace::{Error, Run, RunOptions, RunWriter, TensorAccessLog};
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use zerocopy::IntoBytes;

/// Records as a run of `random-gpt-oss-F16.gguf`.
fn run_of(dir: &Path, records: &[TensorAccessLog]) -> Run {
    let (_, map) = gpt_oss();
    let mut writer = RunWriter::create(dir, manifest(), &map, RunOptions::default()).unwrap();
    for record in records {
        *writer.next_record().unwrap() = *record;
    }
    writer.finish().unwrap();
    Run::open(dir).unwrap()
}

/// The tables of a run.
fn tables_of(records: &[TensorAccessLog]) -> (tempfile::TempDir, TableSummary) {
    let tmp = tempfile::tempdir().unwrap();
    let run = run_of(&tmp.path().join("run"), records);
    let summary = write_tables(&run, tmp.path(), TableOptions::default()).unwrap();
    (tmp, summary)
}

fn read(path: &Path) -> RecordBatch {
    let builder = ParquetRecordBatchReaderBuilder::try_new(File::open(path).unwrap()).unwrap();
    let schema = builder.schema().clone();
    let batches: Vec<_> = builder.build().unwrap().map(Result::unwrap).collect();
    concat_batches(&schema, &batches).unwrap()
}

/// A column of whole numbers, -1 for null.
fn ints(batch: &RecordBatch, name: &str) -> Vec<i64> {
    let column = cast(batch.column_by_name(name).unwrap(), &DataType::Int64).unwrap();
    let column = column.as_primitive::<arrow::datatypes::Int64Type>();
    column.iter().map(|value| value.unwrap_or(-1)).collect()
}

/// A column of names, `-` for null.
fn names(batch: &RecordBatch, name: &str) -> Vec<String> {
    let column = batch.column_by_name(name).unwrap();
    assert!(
        matches!(column.data_type(), DataType::Dictionary(..)),
        "{name} is dictionary-encoded"
    );
    let column = cast(column, &DataType::Utf8).unwrap();
    column
        .as_string::<i32>()
        .iter()
        .map(|value| value.unwrap_or("-").to_owned())
        .collect()
}

#[test]
fn ops_have_one_row_an_operation() {
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
        "0 and plain v4 are unknown"
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
fn accesses_have_each_expert_of_an_operation_once_with_its_own_bytes() {
    let (gguf, map) = gpt_oss();
    let mut records = expert_layer(&gguf, 200, 1, 0, &[&[3, 1], &[1, 15]]);
    records.truncate(2); // gate alone
    let mut bias = record(210, ADD_ID, "ffn_moe_gate_biased-1");
    read_buffer(&mut bias, "ffn_moe_gate-1", 9, 100);
    read_tensor(&mut bias, &gguf, "blk.1.ffn_gate_exps.bias");
    records.extend(expert_operation(&bias, 1, 0, &[&[3, 1], &[1, 15]]));
    let mut dense = record(220, MUL_MAT, "attn-1");
    read_tensor(&mut dense, &gguf, "blk.1.attn_q.weight");
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
            .find(|row| &*row.tensor == "blk.1.ffn_gate_exps.weight" && row.expert_id == Some(id))
            .unwrap()
    };
    for (row, id) in [(0, 1), (1, 3), (2, 15)] {
        assert_eq!(
            (offset[row] as u64, size[row] as u64),
            (expert(id).file_offset, expert(id).size_bytes)
        );
    }
    // Of a bias [n_ff, n_expert], F32, an expert has one row.
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
        "what the record says, above 4 GiB too"
    );
}

#[test]
fn routing_has_each_choice_once() {
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

    // The reader gives the same, and so does the run itself.
    let batches: Vec<_> = read_routing(tmp.path())
        .unwrap()
        .map(Result::unwrap)
        .collect();
    assert_eq!(batches.len(), 1);
    assert_eq!(batches[0].expert_id(), [3, 1, 1, 2, 0, 9, 9, 8, 7, 6, 5, 4]);
    assert_eq!(batches[0].phase(), [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1]);
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
fn more_than_sixteen_experts_are_one_token() {
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
fn whatever_the_projections_are_called_a_layer_counts_once_in_a_pass() {
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
fn many_chunks_on_many_threads_give_what_one_thread_gives() {
    let (gguf, _) = gpt_oss();
    let tmp = tempfile::tempdir().unwrap();
    let mut records = Vec::new();
    let mut timestamp = 1;
    // A prompt whose operations cross the chunks' boundaries, then single tokens: some 200,000 records.
    let experts: Vec<[i32; 4]> = (0..5000)
        .map(|i| [i % 16, (i + 1) % 16, (i + 5) % 16, (i + 11) % 16])
        .collect();
    let prompt: Vec<&[i32]> = experts.iter().map(|ids| &ids[..]).collect();
    let passes = std::iter::once(&prompt[..]).chain(prompt.chunks(1).take(2000));
    for (i, tokens) in (0u32..).zip(passes) {
        for layer in 0..4 {
            records.push(record(timestamp, MUL_MAT, &format!("kqv_out-{layer}")));
            records.extend(expert_layer(&gguf, timestamp + 1, layer, i, tokens));
            timestamp += 10;
        }
    }
    let run = run_of(&tmp.path().join("run"), &records);
    let rows = 7000 * 4 * 4;
    let expected = TableSummary {
        records: records.len() as u64,
        ops: 2001 * 4 * 4,
        accesses: 4 * 3 * (16 + 2) + 2000 * 4 * 3 * (4 + 2),
        routing: rows,
    };
    for threads in [1, 4] {
        let dir = tmp.path().join(threads.to_string());
        let done = std::sync::atomic::AtomicU64::new(0);
        let progress = |n| {
            done.fetch_add(n, std::sync::atomic::Ordering::Relaxed);
        };
        let options = TableOptions {
            threads: NonZero::new(threads),
            progress: Some(&progress),
            ..Default::default()
        };
        assert_eq!(write_tables(&run, &dir, options).unwrap(), expected);
        assert_eq!(done.into_inner(), expected.records);
    }
    for table in ["ops", "accesses", "routing"] {
        let [one, four] = ["1", "4"].map(|dir| {
            fs::read(tmp.path().join(dir).join(table).with_extension("parquet")).unwrap()
        });
        assert!(one == four, "{table} depends on the number of threads");
    }
    let ops = read(&tmp.path().join("4/ops.parquet"));
    assert_eq!(
        ints(&ops, "op_index"),
        (0..expected.ops as i64).collect::<Vec<_>>()
    );
    let groups = ParquetRecordBatchReaderBuilder::try_new(
        File::open(tmp.path().join("4/ops.parquet")).unwrap(),
    )
    .unwrap();
    assert!(groups.metadata().num_row_groups() >= 2);
    let mut counts = [0u64; 16];
    for batch in read_routing(tmp.path().join("4")).unwrap() {
        batch
            .unwrap()
            .expert_id()
            .iter()
            .for_each(|&id| counts[id as usize] += 1);
    }
    assert_eq!(counts.iter().sum::<u64>(), rows);
}

#[test]
fn the_files_tell_their_schema_and_run() {
    let (tmp, _) = tables_of(&[record(1, MUL_MAT, "a")]);
    for table in ["ops", "accesses", "routing"] {
        let file = File::open(tmp.path().join(table).with_extension("parquet")).unwrap();
        let builder = ParquetRecordBatchReaderBuilder::try_new(file).unwrap();
        let metadata = builder
            .metadata()
            .file_metadata()
            .key_value_metadata()
            .unwrap();
        let value = |key: &str| {
            metadata
                .iter()
                .find(|kv| kv.key == key)
                .and_then(|kv| kv.value.clone())
                .unwrap()
        };
        assert_eq!(
            value("moe-analyze.schema"),
            format!("moe-analyze.{table}.v1")
        );
        assert_eq!(
            value("moe-analyze.run_id"),
            Run::open(tmp.path().join("run")).unwrap().id()
        );
        assert!(value("moe-analyze.model").contains("gpt-oss"));
    }
}

#[test]
fn tables_that_exist_stay_unless_forced() {
    let tmp = tempfile::tempdir().unwrap();
    let run = run_of(&tmp.path().join("run"), &[record(1, MUL_MAT, "a")]);
    let dir = tmp.path().join("tables");
    fs::create_dir(&dir).unwrap();
    fs::write(dir.join("accesses.parquet"), "mine").unwrap();
    let error = write_tables(&run, &dir, TableOptions::default()).unwrap_err();
    assert!(
        matches!(&error, Error::Exists { path } if path.ends_with("accesses.parquet")),
        "{error}"
    );
    assert_eq!(
        fs::read_dir(&dir).unwrap().count(),
        1,
        "no other table, no temporary file"
    );
    write_tables(
        &run,
        &dir,
        TableOptions {
            force: true,
            ..Default::default()
        },
    )
    .unwrap();
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 3);
    assert_eq!(read(&dir.join("ops.parquet")).num_rows(), 1);
}

#[test]
fn a_dataset_has_a_partition_a_run() {
    let tmp = tempfile::tempdir().unwrap();
    let (gguf, _) = gpt_oss();
    let dataset = tmp.path().join("dataset");
    let mut ids = Vec::new();
    for (i, expert) in [4, 6].into_iter().enumerate() {
        let run = run_of(
            &tmp.path().join(format!("run-{i}")),
            &expert_layer(&gguf, 1, 0, 0, &[&[expert]]),
        );
        add_to_dataset(&run, &dataset, TableOptions::default()).unwrap();
        assert!(matches!(
            add_to_dataset(&run, &dataset, TableOptions::default()),
            Err(Error::Exists { .. })
        ));
        for table in ["ops", "accesses", "routing"] {
            assert!(
                dataset
                    .join(format!("{table}/run={}/part-0.parquet", run.id()))
                    .is_file()
            );
        }
        ids.push((run.id(), expert as u32));
    }
    ids.sort();
    let batches: Vec<_> = read_routing(&dataset)
        .unwrap()
        .map(Result::unwrap)
        .collect();
    assert_eq!(batches.len(), 2);
    for (batch, (id, expert)) in batches.iter().zip(ids) {
        assert!(
            batch
                .file()
                .to_string_lossy()
                .contains(&format!("run={id}"))
        );
        assert_eq!(batch.expert_id(), [expert]);
    }
}

#[test]
fn a_run_id_is_no_path() {
    let tmp = tempfile::tempdir().unwrap();
    let (_, map) = gpt_oss();
    let manifest = moe_trace::Manifest {
        run_id: "../a/b".into(),
        ..manifest()
    };
    let dir = tmp.path().join("run");
    RunWriter::create(&dir, manifest, &map, RunOptions::default())
        .unwrap()
        .finish()
        .unwrap();
    let run = Run::open(&dir).unwrap();
    add_to_dataset(&run, &tmp.path().join("dataset"), TableOptions::default()).unwrap();
    assert!(
        tmp.path()
            .join("dataset/ops/run=.._a_b/part-0.parquet")
            .is_file()
    );
}

#[test]
fn a_bare_trace_keeps_whole_tensors() {
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
            "{column} is not told by plain v4"
        );
    }
}

#[test]
fn an_empty_trace_gives_empty_tables() {
    let (tmp, summary) = tables_of(&[]);
    assert_eq!(summary, TableSummary::default());
    let ops = read(&tmp.path().join("ops.parquet"));
    assert_eq!(ops.num_rows(), 0);
    assert_eq!(
        ops.column_by_name("op_index")
            .unwrap()
            .as_primitive::<UInt64Type>()
            .len(),
        0
    );
    assert_eq!(read_routing(tmp.path()).unwrap().count(), 0);
}

#[test]
fn a_record_that_makes_no_sense_is_named_and_leaves_no_table() {
    let (gguf, _) = gpt_oss();
    let good = record(1, MUL_MAT, "a");
    let mut phase = good;
    phase.phase = 7;
    let expert = expert_layer(&gguf, 2, 0, 0, &[&[16]])[0];
    let mut layer = expert_layer(&gguf, 2, 0, 0, &[&[1]])[0];
    layer.layer_id.set(u16::MAX);
    let mut lane = expert_layer(&gguf, 2, 0, 0, &[&[1]])[0];
    lane.expert_lane[0] = 99;
    let mut source = good;
    read_tensor(&mut source, &gguf, "token_embd.weight");
    let mut beyond = source;
    beyond.sources[0].offset_or_buffer_id.set(u64::MAX);
    source.sources[0].memory_source = 2;
    for (bad, reason) in [
        (phase, "phase 7"),
        (expert, "expert 16"),
        (layer, "no layer"),
        (lane, "lane 99"),
        (source, "memory source 2"),
        (beyond, "64 bits"),
    ] {
        let mut bad = bad;
        bad.timestamp_ns.set(2);
        let tmp = tempfile::tempdir().unwrap();
        let run = run_of(&tmp.path().join("run"), &[good, bad]);
        let dir = tmp.path().join("tables");
        let error = write_tables(&run, &dir, TableOptions::default()).unwrap_err();
        let message = error.to_string();
        assert!(
            matches!(error, Error::Record { record: 1, .. }),
            "{error:?}"
        );
        assert!(
            message.contains("record 1 at byte 1024") && message.contains(reason),
            "{message}"
        );
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 0);
    }
}
