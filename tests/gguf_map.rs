//! `gguf-map`: rows and formats, checks, verified data, split models, and hostile files.

mod checks;
mod data;
mod hostile;
mod map_formats;
#[cfg(target_os = "linux")] // RLIMIT_DATA counts private writable memory there alone
mod memory;
mod rows;
mod shards;

use std::path::{Path, PathBuf};

use moe_testkit::gguf::Raw;

use crate::support::{Arg, args, file_of, moe_analyze};

const MODELS: [&str; 4] = [
    "fixtures/tiny-qwen3moe-Q4_K_M.gguf",
    "fixtures/tiny-gpt-oss-MXFP4.gguf",
    "fixtures/random-qwen3moe-F16.gguf",
    "fixtures/random-gpt-oss-F16.gguf",
];

/// Writes a file built by hand to `test.gguf`.
fn write(dir: &Path, raw: Raw) -> PathBuf {
    file_of(dir, "test.gguf", raw.bytes)
}

/// Exit code, stdout and stderr of the binary.
fn output_of(args: impl Arg) -> (i32, String, String) {
    let output = moe_analyze().args(args![args]).output().unwrap();
    (
        output.status.code().expect("the program ends by itself"),
        String::from_utf8(output.stdout).unwrap(),
        String::from_utf8(output.stderr).unwrap(),
    )
}
