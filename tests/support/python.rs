//! Python with what notebooks and witnesses need, where there is one.

use std::io::Write;
use std::process::Command;

use super::{arg, repository};

/// The Python of `MOE_PYTHON`, else of `.venv`, else `python3`, if it can import `modules`; else says why `test` is skipped.
pub fn python(test: &str, modules: &str) -> Option<String> {
    let environment = repository(".venv/bin/python");
    let python = match std::env::var("MOE_PYTHON") {
        Ok(python) => python,
        Err(_) if environment.exists() => arg(&environment).to_owned(),
        Err(_) => "python3".to_owned(),
    };
    let probe = format!("import {modules}");
    let reason = match Command::new(&python).args(["-c", &probe]).output() {
        Ok(output) if output.status.success() => return Some(python),
        Ok(output) => {
            let stderr = String::from_utf8_lossy(&output.stderr);
            format!("{python}: {}", stderr.lines().last().unwrap_or("it failed"))
        }
        Err(error) => format!("{python} cannot be run: {error}"),
    };
    // Past the capture of the test harness: a test that was skipped must not look like one that ran.
    let hint =
        "install notebooks/requirements.txt into .venv, or name a Python that has it in MOE_PYTHON";
    let _ = writeln!(std::io::stderr(), "{test}: skipped: {reason}; {hint}");
    None
}
