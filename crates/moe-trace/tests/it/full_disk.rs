//! Recording to a full disk: one clear error, and all records before it are kept.
use std::path::{Path, PathBuf};
use std::process::Command;

use moe_gguf::map::OffsetMap;
use moe_trace::ops::MUL_MAT;
use moe_trace::tables::{RoutingTable, TableOptions, write_tables};
use moe_trace::{Error, ModelInfo, Run, RunOptions, RunWriter, map_table};

use super::common::{gpt_oss, manifest, record, run_of};

const DIR_VARIABLE: &str = "MOE_TRACE_TEST_DIR";

/// Runs `test` of this module in a process with a file size limit of `half_kib` × 512 bytes (the unit of `ulimit -f`).
fn with_small_files(test: &str, dir: &Path, half_kib: u32) {
    // Without the trap, SIGXFSZ would end the process before the write fails.
    let script = format!(
        "trap '' XFSZ; ulimit -f {half_kib} || exit 9; exec \"$0\" --exact full_disk::{test} --ignored --nocapture"
    );
    let this = std::env::current_exe().unwrap();
    let output = Command::new("sh")
        .arg("-c")
        .arg(script)
        .arg(this)
        .env(DIR_VARIABLE, dir)
        .output()
        .unwrap();
    let printed = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && printed.contains("1 passed"),
        "{printed}"
    );
}

fn dir() -> PathBuf {
    std::env::var_os(DIR_VARIABLE)
        .expect("run by with_small_files")
        .into()
}

/// Records until it fails.
fn fill(writer: &mut RunWriter) -> Error {
    for i in 1.. {
        match writer.next_record() {
            Ok(slot) => *slot = record(i, MUL_MAT, "a"),
            Err(error) => return error,
        }
        assert!(i < 1_000_000, "no call returned the failure");
    }
    unreachable!()
}

#[test]
fn reports_failed_write_and_keeps_complete_records() {
    let tmp = tempfile::tempdir().unwrap();
    let dir = tmp.path().join("run");
    with_small_files("record_until_full_and_finish", &dir, 2000);
    let run = Run::open(&dir).unwrap();
    assert_eq!(run.trace.records().len(), 1000);
    assert_eq!(
        (run.trace.size_bytes(), run.trace.truncated_bytes()),
        (1000 * 1024, 0)
    );
    let manifest = run.manifest.unwrap();
    assert_eq!(manifest.records, Some(1000));
    assert!(
        manifest
            .stopped
            .unwrap()
            .contains("a write to the trace failed")
    );
}

#[test]
#[ignore = "part of reports_failed_write_and_keeps_complete_records"]
fn record_until_full_and_finish() {
    let (_, map) = gpt_oss();
    let mut writer = RunWriter::create(&dir(), manifest(), &map, RunOptions::default()).unwrap();
    let error = fill(&mut writer);
    let Error::WriteTrace {
        offset: 1_024_000,
        records: 1000,
        ..
    } = &error
    else {
        panic!("{error:?}")
    };
    let message = error.to_string();
    for part in [
        "trace.bin at byte 1024000",
        "the 1000 records before it are complete",
    ] {
        assert!(message.contains(part), "{message}");
    }
    assert!(
        !message.contains('\n') && !message.contains("--"),
        "{message}"
    );
    assert_eq!(fill(&mut writer).to_string(), message);
    assert_eq!(writer.flush().unwrap_err().to_string(), message);
    assert_eq!(writer.finish().unwrap_err().to_string(), message);
}

#[test]
fn removes_truncated_last_record_and_stores_the_error_when_dropped() {
    let tmp = tempfile::tempdir().unwrap();
    let dir = tmp.path().join("run");
    with_small_files("record_until_full_and_drop", &dir, 201);
    let run = Run::open(&dir).unwrap();
    assert_eq!(
        (run.trace.records().len(), run.trace.truncated_bytes()),
        (100, 0)
    );
    assert!(run.manifest.unwrap().stopped.is_some());
}

/// The failing write is the last one, when the table is completed.
#[test]
fn names_the_table_whose_write_failed() {
    let tmp = tempfile::tempdir().unwrap();
    run_of(&tmp.path().join("run"), &[record(1, MUL_MAT, "a")]);
    with_small_files("write_tables_until_full", tmp.path(), 1);
}

#[test]
#[ignore = "part of names_the_table_whose_write_failed"]
fn write_tables_until_full() {
    let dir = dir();
    let map = OffsetMap { rows: Vec::new() };
    let errors = [
        map_table::write(&dir.join("map.parquet"), &map, &[], false).unwrap_err(),
        RoutingTable::create(&dir.join("routing.parquet"), "id", false)
            .and_then(|table| table.complete("format", &ModelInfo::default()))
            .unwrap_err(),
        write_tables(
            &Run::open(dir.join("run")).unwrap(),
            &dir,
            TableOptions::default(),
        )
        .unwrap_err(),
    ];
    for (error, file) in errors.iter().zip(["map", "routing", "ops"]) {
        let path = dir.join(format!("{file}.parquet"));
        assert!(
            matches!(error, Error::Write { path: found, .. } if *found == path),
            "{error:?}"
        );
        assert!(!path.exists());
    }
}

#[test]
#[ignore = "part of removes_truncated_last_record_and_stores_the_error_when_dropped"]
fn record_until_full_and_drop() {
    let (_, map) = gpt_oss();
    let mut writer = RunWriter::create(&dir(), manifest(), &map, RunOptions::default()).unwrap();
    fill(&mut writer);
}
