//! `gguf-map`: rows and forms, checks, the data verified, models in several files, and hostile files.

#[path = "gguf_map/checks.rs"]
mod checks;
#[path = "gguf_map/data.rs"]
mod data;
#[path = "gguf_map/forms.rs"]
mod forms;
#[path = "gguf_map/hostile.rs"]
mod hostile;
#[path = "gguf_map/memory.rs"]
mod memory;
#[path = "gguf_map/rows.rs"]
mod rows;
#[path = "gguf_map/shards.rs"]
mod shards;
mod support;

use std::path::{Path, PathBuf};

use moe_testkit::gguf::Raw;
use support::{file_of, moe_analyze};

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
fn output_of(args: &[&str]) -> (i32, String, String) {
    let output = moe_analyze().args(args).output().unwrap();
    (
        output.status.code().expect("the program ends by itself"),
        String::from_utf8(output.stdout).unwrap(),
        String::from_utf8(output.stderr).unwrap(),
    )
}
