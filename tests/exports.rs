//! Another program reads the output of `convert`: `exports.py`, which implements the formats from their descriptions and reads
//! the run's records itself.

use std::process::Command;

use moe_testkit::python;

use crate::support::{args, known_run, repository, run};

/// Formats and names of the outputs.
const FORMATS: [(&str, &str); 12] = [
    ("bigmoeonedge", "route.csv"),
    ("coli-usage", "coli_usage"),
    ("ds4-hotlist", "hotlist"),
    ("eplb", "eplb.json"),
    ("eplb-csv", "eplb.csv"),
    ("jsonl", "tokens.jsonl"),
    ("learn", "learn.json"),
    ("mesh-llm", "rankings"),
    ("npy", "routing.npy"),
    ("npy-counts", "counts.npy"),
    ("sglang", "sglang.json"),
    ("thesis-json", "tokens"),
];

#[test]
fn exports_are_readable_by_another_program() {
    let Some(python) = python("numpy") else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    known_run(&run);
    for (format, name) in FORMATS {
        let out = dir.path().join(name);
        run!["--quiet", "convert", run, "--to", format, "--out", out];
    }
    let script = repository("tests/exports.py");
    let output = Command::new(python)
        .args(args![script, dir.path()])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let checked = String::from_utf8_lossy(&output.stdout);
    assert_eq!(checked.lines().count(), FORMATS.len(), "{checked}");
}
