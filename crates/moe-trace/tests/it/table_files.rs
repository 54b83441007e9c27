//! Table files: written in parallel, in datasets, refused, and their metadata.

use std::fs::{self, File};

use arrow::array::AsArray;
use arrow::datatypes::UInt64Type;
use moe_trace::ops::MUL_MAT;
use moe_trace::tables::{TableOptions, TableSummary, add_to_dataset, read_routing, write_tables};
use moe_trace::{Error, RecordFault, Run, RunOptions, RunWriter, SourceFault, TensorAccessLog};
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;

use super::common::*;
use super::read_tables::{ints, read, tables_of};

#[test]
fn writes_equal_files_with_any_number_of_threads() {
    let (gguf, _) = gpt_oss();
    let tmp = tempfile::tempdir().unwrap();
    let mut records = Vec::new();
    let mut timestamp = 1;
    // A prompt whose operations cross the boundaries of chunks, then single tokens: about 200,000 records.
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
            progress: Some(&progress),
            ..Default::default()
        };
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
        let written = pool
            .build()
            .unwrap()
            .install(|| write_tables(&run, &dir, options));
        assert_eq!(written.unwrap(), expected);
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
fn files_contain_their_schema_and_run() {
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
fn replaces_existing_tables_only_with_force() {
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
fn dataset_has_a_partition_for_each_run() {
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
fn replaces_path_separators_in_run_ids() {
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
fn writes_empty_tables_for_an_empty_trace() {
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

fn of_source(fault: &RecordFault) -> Option<&SourceFault> {
    match fault {
        RecordFault::Source { fault, .. } => Some(fault),
        _ => None,
    }
}

#[test]
fn names_an_invalid_record_and_writes_no_table() {
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
    let mut elsewhere = source;
    elsewhere.sources[0].offset_or_buffer_id.set(7);
    source.sources[0].memory_source = 2;
    let mut many = expert_layer(&gguf, 2, 0, 0, &[&[1]])[0];
    many.num_experts = 17;
    let mut later = good;
    later.ext_version = 2;
    type IsExpected = fn(&RecordFault) -> bool;
    let cases: [(TensorAccessLog, IsExpected); 9] = [
        (phase, |fault| {
            matches!(fault, RecordFault::Phase { phase: 7 })
        }),
        (expert, |fault| {
            matches!(
                of_source(fault),
                Some(SourceFault::NoExpert {
                    expert: moe_trace::ExpertId(16),
                    n_expert: 16
                })
            )
        }),
        (layer, |fault| matches!(fault, RecordFault::NoLayer)),
        (lane, |fault| {
            matches!(fault, RecordFault::Lane { lane: 99 })
        }),
        (source, |fault| {
            matches!(
                of_source(fault),
                Some(SourceFault::MemorySource { memory_source: 2 })
            )
        }),
        (beyond, |fault| {
            matches!(
                of_source(fault),
                Some(SourceFault::Overflow {
                    offset: u64::MAX,
                    ..
                })
            )
        }),
        (elsewhere, |fault| {
            matches!(
                of_source(fault),
                Some(SourceFault::OtherTensor {
                    offset: 7,
                    tensor_idx: 0,
                    ..
                })
            )
        }),
        (many, |fault| {
            matches!(fault, RecordFault::Counts { experts: 17, .. })
        }),
        (later, |fault| {
            matches!(fault, RecordFault::Version { found: 2 })
        }),
    ];
    for (bad, is_expected) in cases {
        let mut bad = bad;
        bad.timestamp_ns.set(2);
        let tmp = tempfile::tempdir().unwrap();
        let run = run_of(&tmp.path().join("run"), &[good, bad]);
        let dir = tmp.path().join("tables");
        let error = write_tables(&run, &dir, TableOptions::default()).unwrap_err();
        assert!(
            matches!(&error, Error::Record { record: 1, fault, .. } if is_expected(fault)),
            "{error:?}"
        );
        assert!(!dir.exists(), "the new directory is removed");
    }
}

#[test]
fn interrupted_writer_leaves_no_files() {
    let tmp = tempfile::tempdir().unwrap();
    let run = run_of(&tmp.path().join("run"), &[record(1, MUL_MAT, "a")]);
    let interrupted = std::sync::atomic::AtomicBool::new(true);
    let options = TableOptions {
        interrupted: Some(&interrupted),
        ..Default::default()
    };
    let error = write_tables(&run, &tmp.path().join("deep/tables"), options).unwrap_err();
    assert!(matches!(error, Error::Interrupted { .. }), "{error}");
    assert!(!tmp.path().join("deep").exists());
}
