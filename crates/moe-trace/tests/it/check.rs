//! Rules that records violate, and warnings about incomplete or misleading runs.

use moe_gguf::map::OffsetMap;
use moe_trace::check::{check, mismatched_map, report, stale_tables};
use moe_trace::ops::{MUL_MAT, MUL_MAT_ID};
use moe_trace::record::{PHASE_GENERATE, PHASE_PROMPT};
use moe_trace::tables::{TableOptions, write_tables};
use moe_trace::{
    Error, Manifest, RecordFault, Run, RunOptions, RunWriter, SourceFault, TableFault,
    TensorAccessLog, map_table,
};

use super::common::{
    expert_layer, expert_operation, gpt_oss, manifest, model, read_buffer, record, run_of,
};

fn good() -> Vec<TensorAccessLog> {
    let (gguf, _) = gpt_oss();
    let mut records = vec![record(1, MUL_MAT, "a")];
    records.extend(expert_layer(&gguf, 2, 0, 0, &[&[1, 2], &[3, 15]]));
    records
}

#[test]
fn reports_each_violated_rule_once() {
    type Change = fn(&mut TensorAccessLog);
    let changes: [(&str, Change); 11] = [
        ("expert_lane", |r| r.expert_lane[1] = 99),
        ("sources.memory_source", |r| r.sources[0].memory_source = 7),
        ("expert_ids", |r| r.expert_ids[1].set(-5)),
        ("expert_ids", |r| r.expert_ids[1].set(3)),
        ("expert_ids", |r| r.expert_ids[1].set(16)),
        ("expert_weights", |r| r.expert_weights[0].set(f32::NAN)),
        ("dst_name, sources.name", |r| r.sources[0].name.fill(b'x')),
        ("expert_slot_base", |r| r.expert_slot_base = 255),
        ("num_experts", |r| r.num_experts = 0),
        ("num_sources, num_experts", |r| r.num_experts = 17),
        ("ext_version", |r| r.ext_version = 2),
    ];
    let tmp = tempfile::tempdir().unwrap();
    assert_eq!(check(&run_of(&tmp.path().join("good"), &good())), []);
    for (i, (field, change)) in changes.into_iter().enumerate() {
        let mut records = good();
        change(&mut records[2]);
        let faults = check(&run_of(&tmp.path().join(i.to_string()), &records));
        let found: Vec<_> = faults
            .iter()
            .map(|fault| (fault.field, fault.n_records, fault.first_record))
            .collect();
        assert_eq!(found, [(field, 1, 2)]);
    }
}

/// llama.cpp computes the chunk experts of GroveMoE with the same names as the experts. Two experts of a token may be in one
/// chunk.
#[test]
fn does_not_count_operations_on_chunk_experts_as_routing() {
    let mut records = good();
    for (i, projection) in (0..).zip(["gate", "up", "down"]) {
        let mut head = record(10 + i, MUL_MAT_ID, &format!("ffn_moe_{projection}-0"));
        let weights = format!("blk.0.ffn_{projection}_chexps.weight");
        read_buffer(&mut head, &weights, 9, 1024);
        records.extend(expert_operation(&head, 0, 0, &[&[0, 0], &[1, 7]]));
    }
    let tmp = tempfile::tempdir().unwrap();
    let run = run_of(&tmp.path().join("run"), &records);
    assert_eq!(check(&run), []);
    let routing: Vec<u64> = run.routing().map(|o| o.first_record()).collect();
    assert_eq!(routing, [1]);
}

#[test]
fn lists_missing_keys_of_a_manifest() {
    let tmp = tempfile::tempdir().unwrap();
    let path = tmp.path().join("manifest.json");
    manifest().write(&path).unwrap();
    assert_eq!(Manifest::missing_keys(&path).unwrap().len(), 0);
    std::fs::write(&path, "{}").unwrap();
    let missing = Manifest::missing_keys(&path).unwrap();
    assert_eq!(missing.len(), 28);
    assert!(missing.contains(&"/model/n_expert") && missing.contains(&"/gpu"));
}

#[test]
fn refuses_map_of_another_model() {
    let tmp = tempfile::tempdir().unwrap();
    let run = run_of(&tmp.path().join("run"), &good());
    assert!(mismatched_map(&run).unwrap().is_none());
    assert_eq!(run.warnings().unwrap(), [""; 0]);
    let other = OffsetMap::new(&model("tiny-qwen3moe-Q4_K_M.gguf"));
    let files = [moe_trace::manifest::ModelFile {
        name: "other.gguf".into(),
        size_bytes: 1,
    }];
    let path = run.path.join("gguf-map.parquet");
    map_table::write(&path, &other, &files, true).unwrap();
    let error = Run::open(&run.path).unwrap().warnings().unwrap_err();
    assert!(
        matches!(&error, Error::Table { path: at, fault: TableFault::OtherModel } if *at == path),
        "{error:?}"
    );
    // A map without model metadata is detected by the first record that contradicts it.
    map_table::write(&path, &other, &[], true).unwrap();
    let run = Run::open(&run.path).unwrap();
    let error = write_tables(&run, &tmp.path().join("out"), TableOptions::default()).unwrap_err();
    let Error::Record { fault, .. } = &error else {
        panic!("{error:?}")
    };
    let RecordFault::Source { fault, .. } = fault else {
        panic!("{fault:?}")
    };
    assert!(
        matches!(
            fault,
            SourceFault::OtherTensor { .. } | SourceFault::NoExpert { .. }
        ),
        "{fault:?}"
    );
}

#[test]
fn warns_about_incomplete_runs_and_foreign_tables() {
    let tmp = tempfile::tempdir().unwrap();
    let run = run_of(&tmp.path().join("run"), &good());
    let trace = run.path.join("trace.bin");
    let bytes = std::fs::read(&trace).unwrap();
    std::fs::write(&trace, &bytes[..bytes.len() - 24]).unwrap();
    let warnings = Run::open(&run.path).unwrap().warnings().unwrap();
    assert_eq!(warnings.len(), 2, "{warnings:?}");
    assert!(
        warnings[0].contains("truncated to 1000 bytes"),
        "{warnings:?}"
    );
    assert!(warnings[1].contains("states 7 records") && warnings[1].contains("contains 6"));

    let (_, map) = gpt_oss();
    let dir = tmp.path().join("killed");
    drop(RunWriter::create(&dir, manifest(), &map, RunOptions::default()).unwrap());
    write_tables(&run, &dir.join("tables"), TableOptions::default()).unwrap();
    let killed = Run::open(&dir).unwrap();
    let warnings = killed.warnings().unwrap();
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    assert!(warnings[0].contains("killed"), "{warnings:?}");
    let stale = stale_tables(&killed);
    assert_eq!(stale.len(), 3, "{stale:?}");
    for error in &stale {
        assert!(
            matches!(error, Error::Table { fault: TableFault::OtherRun { run_id }, .. } if *run_id == run.id()),
            "{error:?}"
        );
    }
    assert_eq!(stale_tables(&run).len(), 0);
}

#[test]
fn report_contains_violations_warnings_and_counts() {
    let tmp = tempfile::tempdir().unwrap();
    let run = run_of(&tmp.path().join("good"), &good());
    let found = report(&run);
    assert_eq!(
        (found.violations.len(), found.misleading_counts.len()),
        (0, 0)
    );
    assert_eq!((found.n_records, found.n_extended), (7, 7));
    assert_eq!(run.trace.records().len(), 7);

    // A record without extension whose timestamp is before that of the preceding record. Records after a timestamp of 0 do
    // not count.
    let path = tmp.path().join("trace.bin");
    let mut records = vec![
        v4(3, PHASE_PROMPT, 16, 32),
        record(2, MUL_MAT, "a"),
        v4(4, PHASE_GENERATE, 16, 32),
    ];
    records.push(record(0, MUL_MAT, "b"));
    records.push(record(5, MUL_MAT, "c"));
    std::fs::write(&path, zerocopy::IntoBytes::as_bytes(&*records)).unwrap();
    let run = Run::open(&path).unwrap();
    let found = report(&run);
    assert_eq!((found.n_records, found.n_extended), (3, 1));
    assert_eq!(found.misleading_counts.len(), 1, "{found:?}");
    assert_eq!(found.violations.len(), 1, "{found:?}");
    assert_eq!(found.violations[0].field, "timestamp_ns");
    assert_eq!(run.trace.records().len(), 3);
}

/// A record without extension of an expert operation with `n_experts` experts and `n_ids` ids in the tensor of ids.
fn v4(timestamp_ns: u64, phase: u8, n_experts: u8, n_ids: u64) -> TensorAccessLog {
    let mut record = record(timestamp_ns, MUL_MAT_ID, "ffn_moe_gate-0");
    record.layer_id.set(0);
    record.ext_version = 0;
    record.phase = phase;
    record.num_experts = n_experts;
    for (id, i) in record.expert_ids.iter_mut().zip(0..) {
        id.set(i);
    }
    for (name, size) in [("w", 8), ("x", 8), ("ids", 4 * n_ids)] {
        read_buffer(&mut record, name, 1, size);
    }
    record
}

#[test]
fn warns_about_misleading_records_without_extension() {
    let tmp = tempfile::tempdir().unwrap();
    let path = tmp.path().join("trace.bin");
    let misleading_counts = |records: &[TensorAccessLog]| {
        std::fs::write(&path, zerocopy::IntoBytes::as_bytes(records)).unwrap();
        report(&Run::open(&path).unwrap()).misleading_counts
    };
    let one_token = [v4(1, PHASE_PROMPT, 4, 4), v4(2, PHASE_GENERATE, 4, 4)];
    assert_eq!(misleading_counts(&one_token), [""; 0]);
    let batch = misleading_counts(&[v4(1, PHASE_PROMPT, 4, 24), v4(2, PHASE_GENERATE, 4, 4)]);
    assert_eq!(batch.len(), 1, "{batch:?}");
    assert!(
        batch[0].contains("undercounted: 1 expert operation of prompts"),
        "{batch:?}"
    );
    let warm_up = misleading_counts(&[v4(1, PHASE_PROMPT, 16, 32), v4(2, PHASE_GENERATE, 16, 32)]);
    assert_eq!(warm_up.len(), 1, "{warm_up:?}");
    assert!(
        warm_up[0].starts_with("all 2 expert operations name 16"),
        "{warm_up:?}"
    );
}
