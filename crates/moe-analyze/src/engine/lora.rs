//! Options of LoRA adapters.

use std::path::{Path, PathBuf};

use moe_executor::Adapter;
use moe_gguf::Gguf;
use moe_gguf::map::OffsetMap;
use moe_trace::Manifest;
use moe_trace::manifest::{self, ModelFile};

use crate::model;
use crate::option_values::ValueError;

/// Options of LoRA adapters.
#[derive(Clone, Debug, clap::Args)]
pub struct LoraArgs {
    /// LoRA adapter: a GGUF file, and optionally SCALE, the factor of its products, a finite number [default: 1]; repeat the option
    /// for several adapters
    ///
    /// Adapters run on the CPU only.
    #[arg(long, value_name = "FILE[:SCALE]", value_parser = adapter)]
    pub lora: Vec<LoraArg>,
}

/// A value of `--lora`.
#[derive(Clone, Debug, PartialEq)]
pub struct LoraArg {
    path: PathBuf,
    scale: f32,
}

impl LoraArg {
    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Parses a file with an optional factor after the last colon.
fn adapter(text: &str) -> Result<LoraArg, ValueError> {
    const EXPECTED: ValueError = ValueError::Expected("FILE or FILE:SCALE with a finite number");
    let scaled = text.rsplit_once(':');
    let scaled = scaled.and_then(|(path, scale)| Some((path, scale.parse::<f32>().ok()?)));
    let (path, scale) = scaled.unwrap_or((text, 1.0));
    if path.is_empty() || !scale.is_finite() {
        return Err(EXPECTED);
    }
    Ok(LoraArg {
        path: path.into(),
        scale,
    })
}

/// An opened adapter.
pub struct LoraFile {
    /// The file.
    pub gguf: Gguf,
    /// Factor of its products.
    pub scale: f32,
    path: PathBuf,
}

impl LoraArgs {
    /// Opens the adapters.
    ///
    /// # Errors
    /// A file cannot be read or is incomplete.
    pub fn open(&self) -> anyhow::Result<Vec<LoraFile>> {
        let open = |arg: &LoraArg| -> anyhow::Result<LoraFile> {
            Ok(LoraFile {
                gguf: model::open(Some(Path::new(&arg.path)))?,
                scale: arg.scale,
                path: arg.path.clone(),
            })
        };
        self.lora.iter().map(open).collect()
    }
}

/// Returns the adapters for the executor.
pub fn adapters(files: &[LoraFile]) -> Vec<Adapter<'_>> {
    let adapters = files.iter().map(|file| Adapter {
        gguf: &file.gguf,
        scale: file.scale,
    });
    adapters.collect()
}

/// Returns the offset map of a model and its adapters.
pub fn offset_map(gguf: &Gguf, files: &[LoraFile]) -> OffsetMap {
    let adapters: Vec<&Gguf> = files.iter().map(|file| &file.gguf).collect();
    OffsetMap::with_adapters(gguf, &adapters)
}

/// Adds adapters and their files to a manifest.
pub fn describe(manifest: &mut Manifest, files: &[LoraFile]) {
    for file in files {
        manifest.adapters.push(manifest::Adapter {
            path: file.path.display().to_string(),
            scale: file.scale,
            header_xxh3: format!("{:016x}", file.gguf.header_xxh3()),
        });
        let parts = file.gguf.files().iter();
        manifest.model.files.extend(parts.map(|part| ModelFile {
            name: part.name.clone(),
            size_bytes: part.size_bytes,
        }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splits_file_and_scale_at_the_last_colon() {
        for (text, path, scale) in [
            ("a.gguf", "a.gguf", 1.0),
            ("a.gguf:0.5", "a.gguf", 0.5),
            ("dir:x/a.gguf:-2", "dir:x/a.gguf", -2.0),
            ("C:\\a.gguf", "C:\\a.gguf", 1.0),
            ("a.gguf:", "a.gguf:", 1.0),
        ] {
            let expected = LoraArg {
                path: path.into(),
                scale,
            };
            assert_eq!(adapter(text), Ok(expected), "{text}");
        }
        for text in ["", ":2", "a.gguf:nan", "a.gguf:inf"] {
            assert!(adapter(text).is_err(), "{text}");
        }
    }
}
