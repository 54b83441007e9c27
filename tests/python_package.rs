//! Runs the tests of the Python package `moe_analyze`: `python_package.py`.

use std::process::Command;

use moe_testkit::python;

use crate::support::{arg, args, repository, run};

#[test]
fn python_package_reads_runs_and_tables() {
    let Some(python) = python("numpy, pandas, polars, pyarrow, zstandard") else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    let model = repository("fixtures/tiny-qwen3moe-Q4_K_M.gguf");
    let record = ["--quiet", "record", "--model", arg(&model), "--prompt", "The kernel driver"];
    run![record, "--n-predict", "12", "--out", run];
    let output = Command::new(python)
        .args(args![repository("tests/python_package.py"), run])
        .env("MOE_ANALYZE", assert_cmd::cargo::cargo_bin!("moe-analyze"))
        .env("PYTHONPATH", repository("crates/moe-analyze/python"))
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && stderr.contains("\nRan 17 tests"), "{stderr}");
}
