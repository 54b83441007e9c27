//! The notebooks run, on tables that the binary made.

mod support;

use std::io::Write;
use std::process::{Command, Stdio};

use support::{arg, known_run, repository, stdout_of};

/// Runs a notebook's cells in its own directory and writes nothing.
const EXECUTE: &str = "
import sys, nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], as_version=4)
NotebookClient(notebook, timeout=300, kernel_name='python3', resources={'metadata': {'path': sys.argv[2]}}).execute()
print(sum(len(cell.get('outputs', [])) for cell in notebook.cells))
";

/// Python with all that the notebooks need, or why there is none.
fn python() -> Result<String, String> {
    let environment = repository(".venv/bin/python");
    let python = match std::env::var("MOE_PYTHON") {
        Ok(python) => python,
        Err(_) if environment.exists() => arg(&environment).to_owned(),
        Err(_) => "python3".to_owned(),
    };
    let probe = "import ipykernel, matplotlib, nbclient, nbformat, numpy, polars";
    match Command::new(&python).args(["-c", probe]).output() {
        Err(error) => Err(format!("{python} cannot be run: {error}")),
        Ok(output) if !output.status.success() => {
            let stderr = String::from_utf8_lossy(&output.stderr);
            Err(format!(
                "{python}: {}",
                stderr.lines().last().unwrap_or("it failed")
            ))
        }
        Ok(_) => Ok(python),
    }
}

#[test]
fn first_look_runs() {
    let python = match python() {
        Ok(python) => python,
        Err(reason) => {
            // Past the capture of the test harness: a test that was skipped must not look like one that ran.
            let hint = "install notebooks/requirements.txt into .venv, or name a Python that has it in MOE_PYTHON";
            let _ = writeln!(
                std::io::stderr(),
                "first_look_runs: skipped: {reason}; {hint}"
            );
            return;
        }
    };
    let dir = tempfile::tempdir().unwrap();
    let (run, tables) = (dir.path().join("run"), dir.path().join("tables"));
    known_run(&run);
    stdout_of(&["--quiet", "parquet", arg(&run), "--out", arg(&tables)]);

    let notebook = repository("notebooks/01-first-look.ipynb");
    let output = Command::new(python)
        .args(["-c", EXECUTE, arg(&notebook), arg(dir.path())])
        .env("MOE_TABLES", &tables)
        .env("MPLBACKEND", "module://matplotlib_inline.backend_inline")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let n_outputs: u32 = String::from_utf8_lossy(&output.stdout)
        .trim()
        .parse()
        .unwrap();
    assert!(n_outputs >= 7, "tables and pictures came out: {n_outputs}");
}
