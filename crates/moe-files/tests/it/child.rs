//! Runs ignored tests of this binary in separate processes, because signal handlers and registered inputs are global.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

const DIR_VARIABLE: &str = "MOE_FILES_TEST_DIR";

/// Starts a process that runs the ignored test `test` with the working files in `dir`.
pub fn start(test: &str, dir: &Path) -> Child {
    start_in(
        &mut Command::new(std::env::current_exe().unwrap()),
        test,
        dir,
    )
}

/// Like [`start`], with a command that runs this binary.
pub fn start_in(command: &mut Command, test: &str, dir: &Path) -> Child {
    command
        .args(["--exact", test, "--ignored", "--nocapture"])
        .env(DIR_VARIABLE, dir)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Returns a shell command that runs `preparation`, then the ignored test like [`start`].
pub fn shell(preparation: &str, test: &str, dir: &Path) -> Command {
    let script = format!("{preparation}; exec \"$0\" --exact {test} --ignored --nocapture");
    let mut command = Command::new("sh");
    command
        .args([OsStr::new("-c"), OsStr::new(&script)])
        .arg(std::env::current_exe().unwrap())
        .env(DIR_VARIABLE, dir);
    command
}

/// Fails unless the process ran its test and the test passed.
pub fn assert_passed(output: &Output) {
    let [stdout, stderr] =
        [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    let passed = output.status.success() && stdout.contains("1 passed");
    assert!(passed, "{:?}\n{stdout}\n{stderr}", output.status);
}

/// In a process of [`start`]: the directory of its working files.
pub fn dir() -> PathBuf {
    std::env::var_os(DIR_VARIABLE)
        .expect("run by another test")
        .into()
}
