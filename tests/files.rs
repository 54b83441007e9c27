//! Outputs of all commands after errors and interrupts.

mod errors;
mod inputs;
mod interrupted;
mod outputs;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::support::{Arg, args, known_run};

const MODEL: &str = "fixtures/tiny-qwen3moe-Q4_K_M.gguf";
/// Timeout of conditions.
const PATIENCE: Duration = Duration::from_secs(120);

fn binary() -> PathBuf {
    assert_cmd::cargo::cargo_bin!("moe-analyze").to_owned()
}

fn start(args: impl Arg) -> Child {
    let mut command = Command::new(binary());
    command
        .args(args![args])
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    command.spawn().unwrap()
}

/// Runs a script with the binary as `$0`, in `dir`.
fn shell(dir: &Path, script: &str) -> Output {
    let mut command = Command::new("bash");
    command.arg("-c").arg(script).arg(binary()).current_dir(dir);
    command.output().unwrap()
}

fn stderr_of(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// Waits until `condition` is true or the process has ended; returns whether it still runs.
fn wait_until(child: &mut Child, condition: impl Fn() -> bool) -> bool {
    let start = Instant::now();
    while !condition() {
        if child.try_wait().unwrap().is_some() {
            return false;
        }
        assert!(start.elapsed() < PATIENCE, "the condition was never true");
        std::thread::sleep(Duration::from_millis(1));
    }
    child.try_wait().unwrap().is_none()
}

fn signal(child: &Child, name: &str) {
    let kill = Command::new("kill")
        .args([name, &child.id().to_string()])
        .status();
    assert!(kill.unwrap().success());
}

fn run_in(dir: &Path) -> PathBuf {
    let run = dir.join("run");
    known_run(&run);
    run
}

/// The bytes of all files of a directory.
fn contents(dir: &Path) -> Vec<(String, Vec<u8>)> {
    let read = |name: String| {
        let bytes = fs::read(dir.join(&name)).unwrap_or_default();
        (name, bytes)
    };
    names(dir).into_iter().map(read).collect()
}
