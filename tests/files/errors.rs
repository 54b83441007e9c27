//! After an error there is no output, also with several outputs, and the error contains the file.

use std::fs;

use super::{MODEL, names, run_in, shell, stderr_of};
use crate::support::{moe_analyze, repository, run};

/// Runs commands in a directory with a run, a trace of another tool and a model, expects exit 2 and no new file; returns the
/// last line of each.
fn failures(commands: &[&str], before: &str) -> Vec<String> {
    let dir = tempfile::tempdir().unwrap();
    run_in(dir.path());
    fs::copy(repository(MODEL), dir.path().join("m.gguf")).unwrap();
    run!["convert", dir.path().join("run"), "--to", "jsonl", "--out", dir.path().join("t.jsonl")];
    // The name fills the buffers of writers.
    let name = "a".repeat(20_000);
    let event = format!(
        r#"{{"timestamp_ms":0,"event":"alloc","buffer_id":1,"buffer_ptr":0,"size":64,"name":"{name}"}}"#
    );
    fs::write(dir.path().join("run/buffers.jsonl"), format!("{event}\n")).unwrap();
    let names_before = names(dir.path());
    let run = |command: &&str| {
        let output = shell(dir.path(), &format!("{before}exec \"$0\" {command}"));
        let stderr = stderr_of(&output);
        assert_eq!(output.status.code(), Some(2), "{command}: {stderr}");
        assert_eq!(names(dir.path()), names_before, "{command}");
        stderr.lines().last().unwrap().to_owned()
    };
    commands.iter().map(run).collect()
}

#[cfg(target_os = "linux")]
#[test]
fn failing_output_discards_all_outputs() {
    let lines = failures(
        &[
            "hotness t.jsonl --out a.json --matrix b.npy --value bytes",
            "hotness run --out a.json --matrix b.npy --plot /proc/x.svg",
            "buffers run --out a.json --plot /proc/x.svg",
            "gguf-map m.gguf --manifest-out a --out /proc/x.json",
            "gguf-map m.gguf --manifest-out a --out /proc/x.parquet",
            "parquet run --out t --dataset /proc/x",
            "parquet t.jsonl --out t --dataset /proc/x",
        ],
        "",
    );
    assert!(lines[0].contains("pass --model FILE.gguf"), "{lines:?}");
    for line in &lines[1..] {
        assert!(line.contains("cannot create /proc/x"), "{line}");
    }
}

#[test]
fn full_disk_error_contains_the_file() {
    let commands = [
        ("gguf-map m.gguf --out x.parquet", "x.parquet"),
        ("parquet t.jsonl --out t", "t/routing.parquet"),
        ("convert run --to thesis-json --out j", "j/token-00000.json"),
        ("hotness run --matrix x.parquet", "x.parquet"),
        ("buffers run --out b.json", "b.json"),
    ];
    let lines = failures(&commands.map(|(command, _)| command), "ulimit -f 1; ");
    for (line, (_, file)) in lines.iter().zip(commands) {
        assert!(line.contains(file) && line.contains("File too large"), "{line}");
        assert!(!line.contains("Parquet error") && !line.contains("inner writer"), "{line}");
    }
}

#[test]
fn treats_empty_output_variable_as_unset() {
    let output = moe_analyze()
        .args(["record", "-p", "a", "-n", "1", "--trace", "off"])
        .env("LLAMA_EXPERT_TRACE_OUTPUT", "")
        .output()
        .unwrap();
    let stderr = stderr_of(&output);
    assert_eq!(output.status.code(), Some(0), "{stderr}");
    assert!(!stderr.contains("expert usage"), "{stderr}");
}
