//! The model to run: a file, or the embedded model.

use std::path::Path;

use anyhow::{Context, bail};
use moe_gguf::Gguf;
use moe_gguf::check::check;
use moe_trace::manifest::Model;

/// Name of the embedded model in messages and manifests.
#[cfg(feature = "embedded-model")]
const EMBEDDED: &str = "embedded:tiny-qwen3moe-Q4_K_M.gguf";

/// Opens the model. Rejects truncated files and overlapping tensors.
pub fn open(path: Option<&Path>) -> anyhow::Result<Gguf> {
    let gguf = match path {
        Some(path) => Gguf::open(path)?,
        None => embedded()?,
    };
    for tensor in gguf.tensors() {
        gguf.data(tensor)
            .context("an incomplete model cannot run")?;
    }
    let report = check(&gguf);
    if let Some(overlap) = report.overlaps.first() {
        bail!(
            "{} ({} overlaps); a model with overlapping tensors cannot run: list them with `gguf-map --check-overlaps`",
            overlap.describe(&gguf),
            report.overlaps.len()
        );
    }
    Ok(gguf)
}

/// Opens the model of a run; `None` if it cannot be read any more.
pub fn recorded(model: &Model) -> Option<Gguf> {
    if model.path.starts_with("embedded:") {
        return embedded().ok();
    }
    let path = Path::new(&model.path);
    // Opening a pipe would block.
    path.is_file().then(|| Gguf::open(path).ok()).flatten()
}

#[cfg(feature = "embedded-model")]
fn embedded() -> anyhow::Result<Gguf> {
    static BYTES: &[u8] = include_bytes!("../data/tiny-qwen3moe-Q4_K_M.gguf");
    Ok(Gguf::from_static(EMBEDDED, BYTES)?)
}

#[cfg(not(feature = "embedded-model"))]
fn embedded() -> anyhow::Result<Gguf> {
    bail!("this program was built without the embedded model; pass a model with --model FILE.gguf")
}
