//! Writing run directories and reading them.

use std::fs;
use std::io::ErrorKind;

use moe_trace::ops::{MUL_MAT, MUL_MAT_ID};
use moe_trace::{Error, Run, RunOptions, RunWriter, Trace};
use zerocopy::IntoBytes;

use super::common::{expert_operation, gpt_oss, manifest, record};

#[test]
fn reads_a_run_as_written() {
    let (_, map) = gpt_oss();
    let tmp = tempfile::tempdir().unwrap();
    let dir = tmp.path().join("runs/demo");
    let mut writer = RunWriter::create(&dir, manifest(), &map, RunOptions::default()).unwrap();
    // Several blocks, one of them flushed before it is full.
    for i in 1..=1000 {
        *writer.next_record().unwrap() = record(i, MUL_MAT, &format!("node-{i}"));
        if i == 300 {
            writer.flush().unwrap();
        }
    }
    writer.manifest_mut().tokens.generated = 9;
    assert_eq!(writer.finish().unwrap(), 1000);

    let run = Run::open(&dir).unwrap();
    assert_eq!(run.trace.records().len(), 1000);
    for (i, read) in (1..).zip(run.trace.records()) {
        assert_eq!(
            read.as_bytes(),
            record(i, MUL_MAT, &format!("node-{i}")).as_bytes()
        );
    }
    assert_eq!(run.trace.truncated_bytes(), 0);
    assert_eq!(run.map.as_ref(), Some(&map));
    let read = run.manifest.as_ref().unwrap();
    assert_eq!(read.records, Some(1000));
    assert_eq!(read.tokens.generated, 9);
    assert_eq!(read.model, manifest().model);
    assert!(
        read.run_id.starts_with("20260701T123456Z-"),
        "{}",
        read.run_id
    );
    assert_eq!(run.id(), read.run_id);
    assert_eq!(run.ops().name(MUL_MAT_ID), Some("MUL_MAT_ID"));
}

#[test]
fn waits_until_records_are_in_the_file() {
    let (_, map) = gpt_oss();
    let tmp = tempfile::tempdir().unwrap();
    let mut writer =
        RunWriter::create(tmp.path(), manifest(), &map, RunOptions::default()).unwrap();
    let mut n = 0;
    // Fewer records than a block has, several blocks, more than all blocks, and none.
    for more in [1, 1000, 20_000, 0, 3] {
        for _ in 0..more {
            n += 1;
            *writer.next_record().unwrap() = record(n, MUL_MAT, "node");
        }
        writer.wait().unwrap();
        // If the disk does not keep up, the other records are in a compressed file.
        let run = Run::open(tmp.path()).unwrap();
        assert_eq!(run.trace.records().len() as u64, n);
    }
    assert_eq!(writer.finish().unwrap(), n);
}

#[test]
fn flushed_records_are_readable_before_the_end() {
    let (_, map) = gpt_oss();
    let tmp = tempfile::tempdir().unwrap();
    let mut writer =
        RunWriter::create(tmp.path(), manifest(), &map, RunOptions::default()).unwrap();
    *writer.next_record().unwrap() = record(1, MUL_MAT, "a");
    writer.flush().unwrap();
    writer.flush().unwrap();
    // A slot that is not filled is not a record.
    writer.next_record().unwrap();
    writer.flush().unwrap();
    assert_eq!(writer.records(), 1);
    // A thread writes the record. The deadline ends a test that would otherwise wait forever.
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(120);
    while Trace::open(tmp.path().join("trace.bin"))
        .unwrap()
        .records()
        .is_empty()
    {
        assert!(
            std::time::Instant::now() < deadline,
            "the flushed record was not written"
        );
        std::thread::yield_now();
    }
    writer.next_record().unwrap();
    *writer.next_record().unwrap() = record(2, MUL_MAT, "b");
    assert_eq!(writer.records(), 2);
    writer.next_record().unwrap();
    drop(writer);

    let run = Run::open(tmp.path()).unwrap();
    assert_eq!(
        run.trace
            .records()
            .iter()
            .map(|r| r.timestamp_ns.get())
            .collect::<Vec<_>>(),
        [1, 2]
    );
    assert_eq!(run.trace.size_bytes(), 2048);
    assert_eq!(
        run.manifest.unwrap().records,
        None,
        "a dropped writer does not store the number of records"
    );
}

#[test]
fn trace_limit_stops_recording_and_keeps_all_records() {
    let (_, map) = gpt_oss();
    let tmp = tempfile::tempdir().unwrap();
    let options = RunOptions {
        max_trace_bytes: Some(3 * 1024 + 5),
        ..Default::default()
    };
    let mut writer = RunWriter::create(tmp.path(), manifest(), &map, options).unwrap();
    assert!(writer.has_room(3) && !writer.has_room(4));
    for i in 1..=3 {
        *writer.next_record().unwrap() = record(i, MUL_MAT, "a");
    }
    for _ in 0..2 {
        let Err(Error::TraceFull {
            max_bytes: 3072, ..
        }) = writer.next_record()
        else {
            panic!("the limit was exceeded")
        };
    }
    assert!(writer.has_room(0) && !writer.has_room(1));
    assert_eq!(writer.finish().unwrap(), 3);
    assert_eq!(
        Trace::open(tmp.path().join("trace.bin"))
            .unwrap()
            .records()
            .len(),
        3
    );
}

#[test]
fn map_metadata_contains_run_and_model() {
    let (_, map) = gpt_oss();
    let tmp = tempfile::tempdir().unwrap();
    let writer = RunWriter::create(tmp.path(), manifest(), &map, RunOptions::default()).unwrap();
    let id = writer.finish().map(|_| Run::open(tmp.path()).unwrap().id());
    let file = fs::File::open(tmp.path().join("gguf-map.parquet")).unwrap();
    let reader =
        parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder::try_new(file).unwrap();
    let metadata = reader.metadata().file_metadata().key_value_metadata();
    let value = |key: &str| {
        let entries = metadata.into_iter().flat_map(|entries| entries.iter());
        entries
            .filter(|entry| entry.key == key)
            .find_map(|entry| entry.value.clone())
            .unwrap()
    };
    assert_eq!(value("moe-analyze.run_id"), id.unwrap());
    let model: moe_trace::manifest::Model =
        serde_json::from_str(&value("moe-analyze.model")).unwrap();
    assert_eq!(model, manifest().model);
}

#[test]
fn reads_complete_records_of_a_truncated_trace() {
    let tmp = tempfile::tempdir().unwrap();
    let path = tmp.path().join("trace.bin");
    let records: Vec<_> = (1..=5).map(|i| record(i, MUL_MAT, "a")).collect();
    let bytes = records.as_bytes();
    for (len, n_records, n_truncated) in [
        (5120, 5, 0),
        (5119, 4, 1023),
        (4096, 4, 0),
        (1, 0, 1),
        (0, 0, 0),
    ] {
        fs::write(&path, &bytes[..len]).unwrap();
        let trace = Trace::open(&path).unwrap();
        assert_eq!(
            (trace.records().len(), trace.truncated_bytes()),
            (n_records, n_truncated)
        );
        assert_eq!(trace.operations().count(), n_records);
    }
    // A preallocated file ends with zeros; records after the zeros are ignored.
    let mut padded = bytes[..2048].to_vec();
    padded.extend([0; 3072]);
    padded.extend(&bytes[..1024]);
    fs::write(&path, padded).unwrap();
    let trace = Trace::open(&path).unwrap();
    assert_eq!((trace.records().len(), trace.operations().count()), (2, 2));
}

#[test]
fn groups_records_into_operations_and_tokens() {
    let ids: Vec<i32> = (0..20).rev().collect();
    let head = record(10, MUL_MAT_ID, "ffn_moe_gate-3");
    let mut records = vec![record(9, MUL_MAT, "router-3")];
    records.extend(expert_operation(&head, 3, 100, &[&ids, &[5, -1, 4]]));
    records.push(record(10, MUL_MAT_ID, "ffn_moe_up-3"));
    let tmp = tempfile::tempdir().unwrap();
    let path = tmp.path().join("trace.bin");
    fs::write(&path, records.as_bytes()).unwrap();
    let trace = Trace::open(&path).unwrap();

    let operations: Vec<_> = trace.operations().collect();
    assert_eq!(
        operations
            .iter()
            .map(|op| (op.first_record(), op.records().len()))
            .collect::<Vec<_>>(),
        [(0, 1), (1, 3), (4, 1)]
    );
    let tokens: Vec<_> = operations[1].tokens().collect();
    assert_eq!(
        tokens
            .iter()
            .map(|token| token.token_id().0)
            .collect::<Vec<_>>(),
        [100, 101]
    );
    let first: Vec<_> = tokens[0]
        .experts()
        .map(|e| (i32::from(e.slot), e.expert_id.0 as i32))
        .collect();
    assert_eq!(first, (0..20).zip(ids).collect::<Vec<_>>());
    assert_eq!(tokens[0].experts().last().unwrap().weight, Some(0.05));
    let second: Vec<_> = tokens[1]
        .experts()
        .map(|e| (e.slot, e.expert_id.0))
        .collect();
    assert_eq!(second, [(0, 5), (2, 4)], "a negative id is an empty slot");
}

#[test]
fn ignores_extension_fields_of_records_without_extension() {
    let mut records = expert_operation(&record(1, MUL_MAT_ID, "ffn_moe_gate-0"), 0, 0, &[&[1, 2]]);
    records[0].ext_version = 0;
    records[0].flags = 1;
    records[0].sequence_id.set(9);
    assert!(!records[0].is_continuation());
    let operation = moe_trace::Operations::new(&records).next().unwrap();
    let token = operation.tokens().next().unwrap();
    assert_eq!(token.sequence_id(), None);
    assert!(token.experts().all(|e| e.weight.is_none() && e.lane == 0));
}

#[test]
fn refuses_paths_without_a_run() {
    let tmp = tempfile::tempdir().unwrap();
    let error = Run::open(tmp.path()).unwrap_err();
    assert!(matches!(error, Error::NotARun { .. }), "{error}");
    let error = Run::open(tmp.path().join("absent")).unwrap_err();
    assert!(
        matches!(&error, Error::Io { path, source, .. }
            if path.ends_with("absent") && source.kind() == ErrorKind::NotFound),
        "{error:?}"
    );
}

#[test]
fn derives_the_id_of_a_bare_trace_from_its_contents() {
    let tmp = tempfile::tempdir().unwrap();
    let (a, b) = (tmp.path().join("a.bin"), tmp.path().join("b.bin"));
    fs::write(&a, record(1, MUL_MAT, "a").as_bytes()).unwrap();
    fs::write(&b, record(2, MUL_MAT, "a").as_bytes()).unwrap();
    let (run, other) = (Run::open(&a).unwrap(), Run::open(&b).unwrap());
    assert!(run.manifest.is_none() && run.map.is_none());
    assert!(run.id().starts_with("trace-"));
    assert_eq!(run.id(), Run::open(&a).unwrap().id());
    assert_ne!(run.id(), other.id());
    assert_eq!(run.ops().number("ADD_ID"), Some(3));
}
