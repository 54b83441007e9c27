//! `sql`: known results, from every kind of input, in every format.

mod failures;
mod formats;
mod inputs;
mod tables;

use std::path::{Path, PathBuf};

use crate::support::{args, known_run, moe_analyze, repository, run};

const MODEL: &str = "fixtures/tiny-qwen3moe-Q4_K_M.gguf";

/// A directory with the known run.
fn fixture() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    known_run(&run);
    (dir, run)
}

/// The rows of a result as CSV, without the header.
fn rows(query: &str, inputs: &[&Path]) -> Vec<String> {
    let csv = run!["--quiet", "sql", query, inputs, "-o", "csv"];
    csv.lines().skip(1).map(str::to_owned).collect()
}
