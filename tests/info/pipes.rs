//! Pipes and inaccessible files instead of inputs.

use std::fs;

use super::unsound;
use crate::support::{arg, args, fail, known_run, moe_analyze, run};

/// Pipes without a writer do not block, and unreadable side files do not stop commands that do not need them.
#[test]
fn reports_pipes_in_a_run() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["buffers.jsonl", "transfers.jsonl"] {
        let run = dir.path().join(name);
        known_run(&run);
        let fifo = run.join(name);
        let _ = fs::remove_file(&fifo);
        let made = std::process::Command::new("mkfifo").arg(&fifo).status();
        assert!(made.unwrap().success());
        unsound(&run, "not a regular file");
        let assert = moe_analyze().args(args!["hotness", run]).assert().success();
        let stderr = String::from_utf8_lossy(&assert.get_output().stderr).into_owned();
        assert!(stderr.contains("not a regular file"), "{stderr}");
        let command = if name == "buffers.jsonl" {
            "buffers"
        } else {
            "overlap"
        };
        fail![command, run];
        fs::remove_file(&fifo).unwrap();
        fs::create_dir(&fifo).unwrap();
        unsound(&run, "directory");
        run!["hotness", run];
    }
    let run = dir.path().join("trace");
    known_run(&run);
    fs::remove_file(run.join("trace.bin")).unwrap();
    let made = std::process::Command::new("mkfifo")
        .arg(run.join("trace.bin"))
        .status();
    assert!(made.unwrap().success());
    for command in ["info", "hotness", "graph", "accesses"] {
        fail![command, run];
    }
}

/// Neither input blocks, and each is reported as what it is.
#[test]
fn rejects_pipes_and_inaccessible_paths() {
    let dir = tempfile::tempdir().unwrap();
    let fifo = dir.path().join("fifo");
    let made = std::process::Command::new("mkfifo").arg(&fifo).status();
    assert!(made.unwrap().success());
    let out = dir.path().join("out");
    for args in [
        &["info", arg(&fifo)][..],
        &["hotness", arg(&fifo)],
        &["parquet", arg(&fifo), "--out", arg(&out)],
    ] {
        assert!(fail![args].contains("neither a regular file nor a directory"));
    }

    // A link to itself is inaccessible also for root, who has all permissions.
    let closed = dir.path().join("closed");
    fs::create_dir(&closed).unwrap();
    std::os::unix::fs::symlink("trace.bin", closed.join("trace.bin")).unwrap();
    for command in ["info", "hotness"] {
        let line = fail![command, closed];
        assert!(line.contains("cannot open") && line.contains("trace.bin"), "{line}");
    }
}
