//! `--verify`: reads the data of every tensor, hashes it, checks its values, and compares it with a manifest.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::path::Path;

use anyhow::{Context as _, bail};
use moe_files::AtomicFile;
use moe_files::text::counted;
use moe_gguf::Gguf;
use moe_gguf::verify::{self, Algorithm, Difference, ManifestEntry, VerifiedTensor};
use serde::Serialize;

use crate::context::Context;
use crate::files;
use crate::progress::Progress;

/// Results of reading the data.
#[derive(Debug, Serialize)]
pub struct Data {
    pub hash: Algorithm,
    pub tensors: Vec<VerifiedTensor>,
    /// Differences from the manifest; `None` without a manifest.
    pub differences: Option<Vec<Difference>>,
}

/// A manifest to compare with. All entries have the same hash algorithm.
pub struct Manifest {
    hash: Algorithm,
    entries: Vec<ManifestEntry>,
}

impl Data {
    /// Returns whether all values are finite and all tensors match the manifest.
    pub fn is_sound(&self) -> bool {
        self.n_impossible() == 0 && self.n_different() == 0
    }

    /// Returns the number of tensors with values that are not finite.
    pub fn n_impossible(&self) -> usize {
        self.tensors
            .iter()
            .filter(|tensor| tensor.non_finite.is_some())
            .count()
    }

    /// Returns the number of differences from the manifest.
    pub fn n_different(&self) -> usize {
        self.differences.as_ref().map_or(0, Vec::len)
    }
}

/// Reads all tensors, with a progress bar.
pub fn read(
    gguf: &Gguf,
    hash: Option<Algorithm>,
    manifest: Option<&Manifest>,
    ctx: &Context,
) -> anyhow::Result<Data> {
    let hash = hash
        .or(manifest.map(|manifest| manifest.hash))
        .unwrap_or(Algorithm::Xxh3);
    let progress = Progress::bytes(ctx, gguf.tensors().iter().map(|t| t.size_bytes).sum());
    let tensors = verify::verify(gguf, hash, |n| progress.inc(n))?;
    drop(progress);
    let differences =
        manifest.map(|manifest| verify::compare(gguf, hash, &tensors, &manifest.entries));
    Ok(Data {
        hash,
        tensors,
        differences,
    })
}

/// Reads the entries of a manifest for `hash`, or for the strongest hash in the manifest.
pub fn read_manifest(
    gguf: &Gguf,
    path: &Path,
    hash: Option<Algorithm>,
) -> anyhow::Result<Manifest> {
    // All hashes of gguf-hash and a tensor name of at most 63 bytes need much less than this per tensor.
    let limit = (gguf.tensors().len() as u64 + 64) * 4096;
    let mut text = String::new();
    File::open(path)
        .and_then(|file| file.take(limit).read_to_string(&mut text))
        .with_context(|| format!("cannot read the manifest {}", path.display()))?;
    if text.len() as u64 == limit {
        bail!(
            "{} is longer than a manifest of {} can be; pass a file that --manifest-out or gguf-hash wrote",
            path.display(),
            counted(gguf.tensors().len(), "tensor")
        );
    }
    let mut entries =
        verify::parse_manifest(gguf, &text).with_context(|| path.display().to_string())?;
    let has = |hash| {
        entries
            .iter()
            .any(|entry: &ManifestEntry| entry.algorithm == hash)
    };
    let found = [Algorithm::Sha256, Algorithm::Xxh3]
        .into_iter()
        .find(|&h| has(h));
    let hash = match hash {
        Some(wanted) if !has(wanted) => bail!(
            "{}: the manifest contains no {wanted} hash; {}",
            path.display(),
            found.map_or("write it again with --manifest-out".to_owned(), |found| format!("pass --hash {found}")),
        ),
        Some(wanted) => wanted,
        None => found.with_context(|| {
            format!(
                "{}: the manifest contains neither xxh3 nor sha256 hashes; write one with --manifest-out",
                path.display()
            )
        })?,
    };
    entries.retain(|entry| entry.algorithm == hash);
    Ok(Manifest { hash, entries })
}

/// Writes the hashes to a manifest, which appears at its path on commit.
pub fn prepare_manifest(
    gguf: &Gguf,
    data: &Data,
    path: &Path,
    force: bool,
) -> anyhow::Result<AtomicFile> {
    let tensors = gguf.tensors().iter();
    if let Some(tensor) = tensors.clone().find(|t| t.name.contains(['\n', '\r'])) {
        bail!(
            "the name of tensor {:?} contains a line break, so it cannot be written to a manifest",
            tensor.name
        );
    }
    let text = verify::manifest(gguf, data.hash, &data.tensors);
    files::prepare(path, force, |file| Ok(file.write_all(text.as_bytes())?))
}
