//! Runs the notebooks on runs that the program writes.

use std::path::Path;
use std::process::{Command, Stdio};

use moe_testkit::python;

use crate::support::{arg, args, known_run, repository, run};

/// Runs a notebook's cells in a separate directory, writes nothing, and prints the numbers of outputs and plots.
const EXECUTE: &str = "
import sys, nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], as_version=4)
NotebookClient(notebook, timeout=300, kernel_name='python3', resources={'metadata': {'path': sys.argv[2]}}).execute()
outputs = [output for cell in notebook.cells for output in cell.get('outputs', [])]
print(len(outputs), sum('image/png' in output.get('data', {}) for output in outputs))
";

/// Executes `notebook` with `variables`. Returns its numbers of outputs and plots, or `None` if Python packages are
/// missing.
#[track_caller]
fn execute(notebook: &str, dir: &Path, variables: &[(&str, &Path)]) -> Option<(u32, u32)> {
    let modules = "duckdb, ipykernel, matplotlib, nbclient, nbformat, numpy, polars";
    let python = python(modules)?;
    let notebook = repository(&format!("notebooks/{notebook}.ipynb"));
    let output = Command::new(python)
        .args(args!["-c", EXECUTE, notebook, dir])
        .envs(variables.iter().copied())
        .env("MOE_ANALYZE", assert_cmd::cargo::cargo_bin!("moe-analyze"))
        .env("PYTHONPATH", repository("crates/moe-analyze/python"))
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .env("MPLBACKEND", "module://matplotlib_inline.backend_inline")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    let stdout = String::from_utf8_lossy(&output.stdout);
    let numbers: Vec<u32> = stdout
        .split_whitespace()
        .map(|n| n.parse().unwrap())
        .collect();
    Some((numbers[0], numbers[1]))
}

/// Records a few tokens of a fixture.
fn record(run: &Path, model: &str, prompt: &str) {
    let model = repository(&format!("fixtures/{model}.gguf"));
    let record = ["--quiet", "record", "--model", arg(&model), "--prompt", prompt];
    run![record, "--n-predict", "12", "--out", run];
}

/// The run directories in README and the notebooks differ, so that a user can follow one after the other.
#[test]
fn notebooks_use_separate_run_directories() {
    let mut recorded = std::collections::BTreeMap::new();
    for file in [
        "README.md",
        "notebooks/01-first-look.ipynb",
        "notebooks/02-access-patterns.ipynb",
        "notebooks/03-two-runs.ipynb",
        "notebooks/04-how-big-a-cache.ipynb",
    ] {
        let text = std::fs::read_to_string(repository(file)).unwrap();
        let mut n = 0;
        for line in text
            .lines()
            .filter(|line| line.contains("moe-analyze record "))
        {
            let Some((_, out)) = line.split_once("--out runs/") else {
                continue;
            };
            let name: String = out.chars().take_while(|c| !" `\\".contains(*c)).collect();
            let other = recorded.insert(name.clone(), file);
            assert!(other.is_none_or(|other| other == file), "{name}: {file}, {other:?}");
            n += 1;
        }
        assert!(n > 0, "{file}");
    }
}

#[test]
fn runs_first_look() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    known_run(&run);
    let variables = [("MOE_RUN", &*run)];
    let outputs = execute("01-first-look", dir.path(), &variables);
    if let Some((n_outputs, n_pictures)) = outputs {
        assert!(n_outputs >= 7 && n_pictures == 3, "{n_outputs}, {n_pictures}");
    }
}

#[test]
fn runs_access_patterns() {
    for model in ["tiny-gpt-oss-MXFP4", "random-dots1-F16"] {
        let dir = tempfile::tempdir().unwrap();
        let run = dir.path().join("run");
        record(&run, model, "The kernel driver");
        let variables = [("MOE_RUN", &*run)];
        let outputs = execute("02-access-patterns", dir.path(), &variables);
        if let Some((n_outputs, n_pictures)) = outputs {
            assert!(n_outputs >= 11 && n_pictures == 6, "{n_outputs}, {n_pictures}");
        }
    }
}

#[test]
fn runs_two_runs() {
    let dir = tempfile::tempdir().unwrap();
    let dataset = dir.path().join("dataset");
    for (name, prompt) in [("a", "The kernel driver"), ("b", "Once upon a time")] {
        let run = dir.path().join(name);
        record(&run, "tiny-qwen3moe-Q4_K_M", prompt);
        run!["--quiet", "parquet", run, "--dataset", dataset];
    }
    let variables = [("MOE_DATASET", &*dataset)];
    let outputs = execute("03-two-runs", dir.path(), &variables);
    if let Some((n_outputs, n_pictures)) = outputs {
        assert!(n_outputs >= 8 && n_pictures == 4, "{n_outputs}, {n_pictures}");
    }
}

#[test]
fn runs_how_big_a_cache() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    record(&run, "tiny-qwen3moe-Q4_K_M", "The kernel driver");
    let variables = [("MOE_RUN", &*run)];
    let outputs = execute("04-how-big-a-cache", dir.path(), &variables);
    if let Some((n_outputs, n_pictures)) = outputs {
        assert!(n_outputs >= 12 && n_pictures == 5, "{n_outputs}, {n_pictures}");
    }
}
