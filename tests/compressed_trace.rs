//! Runs whose records were compressed while recording, complete and after a kill.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::support::*;

const RECORD_SIZE: usize = 1024;
const REST: &str = "trace-rest.bin.zst";

fn record(run: &Path, options: &[&str]) {
    run!["record", "--quiet", "--prompt", "Hello", "--n-predict", "40", "--out", run, options];
}

#[test]
fn expands_the_records_at_the_end() {
    let dir = tempfile::tempdir().unwrap();
    let (plain, compressed) = (dir.path().join("plain"), dir.path().join("compressed"));
    record(&plain, &[]);
    record(&compressed, &["--compress-trace"]);
    run!["diff", plain, compressed];
    assert!(!compressed.join(REST).exists());
    let manifest: Value =
        serde_json::from_slice(&fs::read(compressed.join("manifest.json")).unwrap()).unwrap();
    let bytes = fs::metadata(compressed.join("trace.bin")).unwrap().len();
    let expanded = manifest["expansion"]["bytes"].as_u64().unwrap();
    // The first block is not compressed.
    assert!(
        expanded > 0 && expanded < bytes && expanded.is_multiple_of(RECORD_SIZE as u64),
        "{expanded}"
    );
    assert!(run!["info", compressed].contains("compressed while recording"));
}

/// Divides the trace of a run as a recorder leaves it that is killed while it compresses records.
fn divide(run: &Path, n_first: usize) {
    let trace = fs::read(run.join("trace.bin")).unwrap();
    let (first, rest) = trace.split_at(n_first * RECORD_SIZE);
    let mut bytes = b"\x50\x2a\x4d\x18\x10\0\0\0moetrace".to_vec();
    bytes.extend((first.len() as u64).to_le_bytes());
    for block in rest.chunks(64 * RECORD_SIZE) {
        let mut frame = zstd::Encoder::new(Vec::new(), 1).unwrap();
        frame.include_checksum(true).unwrap();
        frame.write_all(block).unwrap();
        bytes.extend(frame.finish().unwrap());
    }
    fs::write(run.join(REST), bytes).unwrap();
    fs::write(run.join("trace.bin"), first).unwrap();
}

#[test]
fn every_command_reads_both_files_of_a_killed_recorder() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    let model = repository("fixtures/tiny-qwen3moe-Q4_K_M.gguf");
    record(&run, &[]);
    let outputs = || {
        let (learn, tables) = (dir.path().join("learn.json"), dir.path().join("tables"));
        run!["convert", run, "--to", "learn", "--out", learn, "--force"];
        run!["parquet", run, "--out", tables, "--force"];
        [
            fs::read_to_string(learn).unwrap(),
            run!["stability", tables],
            run!["info", run],
            run!["hotness", run],
            run!["hotness", run.join("trace.bin")],
            run!["stability", run],
            run!["plan", run, "--model", model, "--budget-mib", "2"],
            run!["simulate", run, "--budget-mib", "2"],
            run!["accesses", run],
            run!["graph", run],
            run!["buffers", run],
            run!["diff", run, run],
        ]
    };
    let complete = outputs();
    divide(&run, 100);
    for (after, before) in outputs().iter().zip(&complete) {
        assert_eq!(after, before);
    }
}

#[test]
fn uses_the_records_before_damage() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    record(&run, &[]);
    divide(&run, 100);
    let path = run.join(REST);
    let mut bytes = fs::read(&path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle..middle + 40].fill(0xa5);
    fs::write(&path, bytes).unwrap();
    let done = moe_analyze().arg("hotness").arg(&run).assert().success();
    let warnings = String::from_utf8(done.get_output().stderr.clone()).unwrap();
    assert!(warnings.contains("trace-rest.bin.zst is damaged"), "{warnings}");
    let found = moe_analyze().arg("info").arg(&run).assert().code(1);
    let facts = String::from_utf8(found.get_output().stdout.clone()).unwrap();
    assert!(facts.contains("trace-rest.bin.zst is damaged"), "{facts}");
    fs::remove_file(path).unwrap();
    run!["hotness", run];
}

/// After a power loss, `trace.bin` can be shorter than the part that precedes the compressed records.
#[test]
fn reports_compressed_records_that_do_not_follow_the_trace() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    record(&run, &[]);
    divide(&run, 100);
    let trace = fs::read(run.join("trace.bin")).unwrap();
    fs::write(run.join("trace.bin"), &trace[..50 * RECORD_SIZE]).unwrap();
    let found = moe_analyze().arg("info").arg(&run).assert().code(1);
    let facts = String::from_utf8(found.get_output().stdout.clone()).unwrap();
    assert!(facts.contains("trace.bin ends before the first of its records"), "{facts}");
}

#[test]
fn reports_a_missing_directory_for_temporary_files() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    record(&run, &[]);
    divide(&run, 100);
    let mut command = moe_analyze();
    command.arg("hotness").arg(&run);
    command.env("TMPDIR", dir.path().join("missing"));
    let failed = command.assert().code(2);
    let error = String::from_utf8(failed.get_output().stderr.clone()).unwrap();
    assert!(error.contains("($TMPDIR) must exist and have room"), "{error}");
    assert!(!error.contains("remove"), "{error}");
}

#[test]
fn replacing_a_run_removes_its_compressed_records() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    record(&run, &[]);
    divide(&run, 100);
    record(&run, &["--force"]);
    assert!(!run.join(REST).exists());
    run!["info", run];
}

/// A recorder that is killed leaves a run that can be read.
#[cfg(unix)]
#[test]
fn a_killed_recorder_loses_little() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    let mut process = Command::new(moe_analyze().get_program())
        .args(["record", "--quiet", "--compress-trace", "--ignore-eos", "--n-predict", "100000"])
        .args(["--ctx-size", "100100", "--out"])
        .arg(&run)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let rest = run.join(REST);
    let started = std::time::Instant::now();
    while fs::metadata(&rest).map_or(0, |found| found.len()) < 50_000 {
        assert!(process.try_wait().unwrap().is_none(), "the recorder has ended");
        assert!(started.elapsed().as_secs() < 120, "nothing was compressed");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    // While it records, too.
    run!["hotness", run];
    process.kill().unwrap();
    process.wait().unwrap();
    let info: Value = serde_json::from_str(&run!["info", "-o", "json", run]).unwrap();
    let trace = fs::metadata(run.join("trace.bin")).unwrap().len();
    let records = info["records"].as_u64().unwrap();
    assert!(records > trace / RECORD_SIZE as u64, "{records}");
}
