//! `--verify`: the data of every tensor read, hashed, looked into, and compared with a manifest.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::path::Path;

use anyhow::{Context as _, bail};
use moe_files::AtomicFile;
use moe_gguf::Gguf;
use moe_gguf::text::counted;
use moe_gguf::verify::{self, Algorithm, Difference, ManifestEntry, Verified};
use serde::Serialize;

use crate::context::Context;
use crate::files;
use crate::progress::Progress;

/// What reading the data told.
#[derive(Debug, Serialize)]
pub struct Data {
    pub hash: Algorithm,
    pub tensors: Vec<Verified>,
    /// From the manifest, if there was one to compare with.
    pub differences: Option<Vec<Difference>>,
}

/// A manifest to compare with; all entries are of one hash.
pub struct Manifest {
    hash: Algorithm,
    entries: Vec<ManifestEntry>,
}

impl Data {
    /// Whether no value is impossible and no tensor differs from the manifest.
    pub fn is_sound(&self) -> bool {
        self.n_impossible() == 0 && self.n_different() == 0
    }

    /// Tensors with impossible values.
    pub fn n_impossible(&self) -> usize {
        self.tensors
            .iter()
            .filter(|tensor| tensor.impossible.is_some())
            .count()
    }

    /// Differences from the manifest.
    pub fn n_different(&self) -> usize {
        self.differences.as_ref().map_or(0, Vec::len)
    }
}

/// Reads all tensors, with a bar.
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

/// Reads a manifest: the entries of `hash`, or of the strongest hash that it has.
pub fn read_manifest(
    gguf: &Gguf,
    path: &Path,
    hash: Option<Algorithm>,
) -> anyhow::Result<Manifest> {
    // Every hash that gguf-hash knows takes far less than this a tensor; names are of 63 bytes at most.
    let limit = (gguf.tensors().len() as u64 + 64) * 4096;
    let mut text = String::new();
    File::open(path)
        .and_then(|file| file.take(limit).read_to_string(&mut text))
        .with_context(|| format!("cannot read the manifest {}", path.display()))?;
    if text.len() as u64 == limit {
        bail!(
            "{}: longer than a manifest of {} can be; is it one?",
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
            "{}: the manifest has no {wanted} of any tensor; {}",
            path.display(),
            found.map_or("make it again".to_owned(), |found| format!("pass --hash {found}")),
        ),
        Some(wanted) => wanted,
        None => found.with_context(|| {
            format!(
                "{}: the manifest has neither xxh3 nor sha256 of any tensor; make one with --manifest-out",
                path.display()
            )
        })?,
    };
    entries.retain(|entry| entry.algorithm == hash);
    Ok(Manifest { hash, entries })
}

/// Writes the hashes that were read to a file, which is in its place once it is committed.
pub fn prepare_manifest(
    gguf: &Gguf,
    data: &Data,
    path: &Path,
    force: bool,
) -> anyhow::Result<AtomicFile> {
    let tensors = gguf.tensors().iter();
    if let Some(tensor) = tensors.clone().find(|t| t.name.contains(['\n', '\r'])) {
        bail!(
            "tensor {:?} has a line break in its name, so a manifest of lines cannot hold it",
            tensor.name
        );
    }
    let text = verify::manifest(gguf, data.hash, &data.tensors);
    files::prepare(path, force, |file| Ok(file.write_all(text.as_bytes())?))
}
