//! Inputs that hold no routing, are damaged, or are something else.

use std::fs;

use moe_trace::record::PHASE_PROMPT;

use crate::Fixture;
use crate::support::{self, arg, failure_of, file_of, moe_analyze, stdout_of};

#[test]
fn without_routing_there_is_no_hotness() {
    let fixture = Fixture::new();
    let trace = fs::read(fixture.path("run/trace.bin")).unwrap();
    // An empty trace, and one in which nothing but the first operation, an attention product, was logged.
    for (name, bytes) in [("empty", &trace[..0]), ("dense", &trace[..1024])] {
        let run = fixture.path(name);
        fs::create_dir(&run).unwrap();
        fs::copy(fixture.path("run/manifest.json"), run.join("manifest.json")).unwrap();
        fs::write(run.join("trace.bin"), bytes).unwrap();
        let out = fixture.path("learn.json");
        let line = failure_of(&["--quiet", "hotness", arg(&run), "--out", arg(&out)]);
        assert!(line.contains("no token was routed"), "{line}");
        assert!(!out.exists());
    }
    // A run that only read a prompt has generated nothing.
    let records = trace
        .chunks(1024)
        .filter(|record| record[17] == PHASE_PROMPT);
    let prompt = fixture.path("prompt.bin");
    fs::write(&prompt, records.flatten().copied().collect::<Vec<u8>>()).unwrap();
    assert!(
        failure_of(&["hotness", arg(&prompt), "--phase", "generate"])
            .contains("no token was routed")
    );
    stdout_of(&["hotness", arg(&prompt), "--phase", "prompt"]);
}

#[test]
fn impossible_records_are_named() {
    let fixture = Fixture::new();
    let trace_file = fixture.path("run/trace.bin");
    let mut trace = fs::read(&trace_file).unwrap();
    let at = trace
        .chunks(1024)
        .position(|record| record[16] == moe_trace::ops::MUL_MAT_ID)
        .unwrap();
    trace[at * 1024 + 792..][..4].copy_from_slice(&77i32.to_le_bytes());
    fs::write(&trace_file, &trace).unwrap();
    let line = failure_of(&["hotness", arg(&fixture.path("run"))]);
    assert!(
        line.contains("expert 77") && line.contains(&format!("record {at}")),
        "{line}"
    );
}

#[test]
fn a_cut_trace_counts_its_whole_records() {
    let fixture = Fixture::new();
    let trace = fs::read(fixture.path("run/trace.bin")).unwrap();
    let cut = fixture.path("cut.bin");
    fs::write(&cut, &trace[..trace.len() - 100]).unwrap();
    let summary = stdout_of(&["hotness", arg(&cut)]);
    let counted = summary.lines().nth(1).unwrap();
    assert!(
        counted.starts_with("16 prompt and generated tokens"),
        "{summary}"
    );
}

#[test]
fn bad_input_is_one_line_and_exit_2() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name, bytes: &[u8]| file_of(dir.path(), name, bytes);
    let inputs = [
        (dir.path().join("absent"), "cannot open"),
        (file("empty.bin", b""), "is empty"),
        (
            file("text.bin", b"no trace at all"),
            "not a file that is known",
        ),
        (file("zeros.bin", &[0; 4096]), "not a file that is known"),
        (
            file("table.parquet", b"PAR1 and then nothing"),
            "table.parquet is damaged: Invalid Parquet file. Corrupt footer",
        ),
        (file("learn.json", b"{}"), "JSON"),
        (
            support::repository("fixtures/random-qwen3moe-F16.gguf"),
            "is a model",
        ),
        (dir.path().to_owned(), "neither a run directory"),
    ];
    for (path, expected) in &inputs {
        let line = failure_of(&["hotness", arg(path)]);
        assert!(
            line.contains(expected) && line.contains(arg(path)),
            "{expected}: {line}"
        );
    }
    moe_analyze().args(["hotness"]).assert().code(2);
}
