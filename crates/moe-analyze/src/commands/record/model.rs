//! The model to run: a file, or the one in this program.

use std::path::Path;

use anyhow::Context;
use moe_gguf::Gguf;

/// Name of the embedded model in messages and manifests.
#[cfg(feature = "embedded-model")]
const EMBEDDED: &str = "embedded:tiny-qwen3moe-Q4_K_M.gguf";

/// Opens the model and refuses one whose data is cut off.
pub fn open(path: Option<&Path>) -> anyhow::Result<Gguf> {
    let gguf = match path {
        Some(path) => Gguf::open(path)?,
        None => embedded()?,
    };
    for tensor in gguf.tensors() {
        gguf.data(tensor)
            .context("a model that is not whole cannot run")?;
    }
    Ok(gguf)
}

#[cfg(feature = "embedded-model")]
fn embedded() -> anyhow::Result<Gguf> {
    static BYTES: &[u8] = include_bytes!("../../../../../fixtures/tiny-qwen3moe-Q4_K_M.gguf");
    Ok(Gguf::from_static(EMBEDDED, BYTES)?)
}

#[cfg(not(feature = "embedded-model"))]
fn embedded() -> anyhow::Result<Gguf> {
    anyhow::bail!(
        "this program was built without the embedded model; give one with --model FILE.gguf"
    )
}
