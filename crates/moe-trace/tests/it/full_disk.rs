//! A disk that is full while recording: one clear error, and the records before it stay.
use std::path::{Path, PathBuf};
use std::process::Command;

use moe_gguf::map::OffsetMap;
use moe_trace::ops::MUL_MAT;
use moe_trace::tables::{RoutingTable, TableOptions, write_tables};
use moe_trace::{Error, Facts, Run, RunOptions, RunWriter, map_table};

use super::common::{gpt_oss, manifest, record, run_of};

const DIR_VARIABLE: &str = "MOE_TRACE_TEST_DIR";

/// Runs `test` of this module in a process whose files may have `half_kib` times 512 bytes, the unit of `ulimit -f`.
fn with_small_files(test: &str, dir: &Path, half_kib: u32) {
    // Without the trap, the signal of the limit would end the process before the write fails.
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
        assert!(i < 1_000_000, "the failure never showed");
    }
    unreachable!()
}

#[test]
fn a_failed_write_shows_and_keeps_what_is_whole() {
    let tmp = tempfile::tempdir().unwrap();
    let dir = tmp.path().join("run");
    with_small_files("record_until_full_and_finish", &dir, 2000);
    let run = Run::open(&dir).unwrap();
    assert_eq!(run.trace.records().len(), 1000);
    assert_eq!(
        (run.trace.size_bytes(), run.trace.cut_bytes()),
        (1000 * 1024, 0)
    );
    let manifest = run.manifest.unwrap();
    assert_eq!(manifest.records, Some(1000));
    assert!(manifest.stopped.unwrap().contains("could not be written"));
}

#[test]
#[ignore = "part of a_failed_write_shows_and_keeps_what_is_whole"]
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
        "the 1000 records before it are kept",
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
fn a_cut_last_record_is_removed_and_a_dropped_writer_says_why_it_stopped() {
    let tmp = tempfile::tempdir().unwrap();
    let dir = tmp.path().join("run");
    with_small_files("record_until_full_and_drop", &dir, 201);
    let run = Run::open(&dir).unwrap();
    assert_eq!((run.trace.records().len(), run.trace.cut_bytes()), (100, 0));
    assert!(run.manifest.unwrap().stopped.is_some());
}

/// The last bytes of a table are written when it is completed.
#[test]
fn a_failed_write_of_a_table_names_the_file() {
    let tmp = tempfile::tempdir().unwrap();
    run_of(&tmp.path().join("run"), &[record(1, MUL_MAT, "a")]);
    with_small_files("write_tables_until_full", tmp.path(), 1);
}

#[test]
#[ignore = "part of a_failed_write_of_a_table_names_the_file"]
fn write_tables_until_full() {
    let dir = dir();
    let map = OffsetMap { rows: Vec::new() };
    let errors = [
        map_table::write(&dir.join("map.parquet"), &map, &[], false).unwrap_err(),
        RoutingTable::create(&dir.join("routing.parquet"), "id", false)
            .and_then(|table| table.complete("format", &Facts::default()))
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
#[ignore = "part of a_cut_last_record_is_removed_and_a_dropped_writer_says_why_it_stopped"]
fn record_until_full_and_drop() {
    let (_, map) = gpt_oss();
    let mut writer = RunWriter::create(&dir(), manifest(), &map, RunOptions::default()).unwrap();
    fill(&mut writer);
}
