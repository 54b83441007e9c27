//! A replacement for the driver of a GPU.

use std::path::Path;
use std::process::Command;

use super::{Arg, args, moe_analyze, repository};

/// Compiles the driver into a directory; skips the running test without a C compiler.
#[track_caller]
pub fn stand_in() -> Option<tempfile::TempDir> {
    if !moe_testkit::has_compiler("cc") {
        return None;
    }
    let dir = tempfile::tempdir().unwrap();
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-fPIC", "-o"]);
    cc.arg(dir.path().join("libcuda.so"));
    cc.arg(repository("tests/support/libcuda.c"));
    let status = cc.status().unwrap();
    assert!(status.success(), "{cc:?}");
    Some(dir)
}

/// The program with the driver, which fails at a step, or at no step if that is empty.
pub fn with_gpu(stand_in: &Path, fails: &str, args: impl Arg) -> assert_cmd::Command {
    let mut command = moe_analyze();
    command.env("LD_LIBRARY_PATH", stand_in);
    command.env("STAND_IN_FAILS", fails).args(args![args]);
    command
}
