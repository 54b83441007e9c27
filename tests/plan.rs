//! `plan`: plans and updates of a hot expert cache.

mod budgets;
mod making;
mod memory;
mod models;
mod reports;
mod updating;

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::{Arg, arg, args, file_of, run};

const QWEN: &str = "fixtures/tiny-qwen3moe-Q4_K_M.gguf";
const GPT_OSS: &str = "fixtures/tiny-gpt-oss-MXFP4.gguf";
/// Size of an expert of the gpt-oss fixture in bytes: three MXFP4 matrices of 64 × 256 and F32 biases of 64, 64 and 256.
const GPT_OSS_EXPERT: u64 = 3 * 64 * 256 / 32 * 17 + (64 + 64 + 256) * 4;

/// A directory with a small learn file, `learn.json`: in layer 0 the experts 3 (9 activations), 5 (4) and 6 (1), in layer 2
/// expert 1 (8).
fn workplace() -> TempDir {
    let dir = TempDir::new().unwrap();
    let learn = json!({"schema": "llama.cpp.moe_layer_opt_perf.v1", "n_expert": 32, "layers": [
        {"layer": 0, "calls": 7, "experts": [[3, 9], [5, 4], [6, 1]], "note": "kept"},
        {"layer": 2, "calls": 7, "experts": [[1, 8]]}]});
    fs::write(dir.path().join("learn.json"), learn.to_string()).unwrap();
    dir
}

fn write(dir: &TempDir, name: &str, text: &str) -> PathBuf {
    file_of(dir.path(), name, text)
}

fn json_of(args: impl Arg) -> Value {
    serde_json::from_str(&run![args]).unwrap()
}

/// Runs `plan` on a learn file and a model, with 1 MiB for experts.
fn plan_of<'a>(learn: &'a Path, model: &'a Path) -> [&'a str; 6] {
    ["plan", arg(learn), "--model", arg(model), "--budget-mib", "1"]
}

/// The plan, as JSON.
fn planned(learn: &Path, model: &Path, more: impl Arg) -> Value {
    json_of(args![plan_of(learn, model), more, "-o", "json"])
}

/// `(layer, expert, lane)` of a plan.
fn selected(plan: &Value) -> Vec<(u64, u64, u64)> {
    let number = |entry: &Value, key| entry[key].as_u64().unwrap();
    let selected = plan["selected"].as_array().unwrap().iter();
    selected
        .map(|entry| (number(entry, "layer"), number(entry, "expert"), number(entry, "lane")))
        .collect()
}
