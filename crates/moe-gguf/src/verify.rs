//! Reads the data: a hash of every tensor, a manifest of them, and values that no model has.
//!
//! Data is read through the mapping, a tensor at a time and a piece at a time, so a model may be
//! larger than the memory.

use std::fmt::{self, Write as _};
use std::str::FromStr;

use moe_files::text::strip_byte_order_mark;
use serde::Serialize;
use sha2::{Digest, Sha256};
use thiserror::Error;
use xxhash_rust::xxh3::Xxh3;

use crate::error::Error;
use crate::gguf::{Gguf, GgufFile};
use crate::non_finite::{NonFinite, non_finite};

/// Bytes read between two reports of progress.
const PIECE: usize = 16 << 20;

/// Which hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Algorithm {
    /// XXH3, 64 bits: fast, against accidents.
    Xxh3,
    /// SHA-256: slow, against malice too.
    Sha256,
}

impl Algorithm {
    /// The name used in manifests.
    pub const fn as_str(self) -> &'static str {
        match self {
            Algorithm::Xxh3 => "xxh3",
            Algorithm::Sha256 => "sha256",
        }
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// The name of a hash that is not supported.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{name:?} is not a supported hash; xxh3 and sha256 are")]
pub struct UnknownAlgorithm {
    /// The name.
    pub name: String,
}

impl FromStr for Algorithm {
    type Err = UnknownAlgorithm;

    fn from_str(text: &str) -> Result<Algorithm, UnknownAlgorithm> {
        match text {
            "xxh3" => Ok(Algorithm::Xxh3),
            "sha256" => Ok(Algorithm::Sha256),
            _ => Err(UnknownAlgorithm {
                name: text.to_owned(),
            }),
        }
    }
}

/// What reading a tensor told.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Verified {
    /// Index of the tensor.
    pub tensor: u32,
    /// Hash of its data, in lower-case hexadecimal digits.
    pub hash: String,
    /// Values that no model has; `None` where there are none.
    pub impossible: Option<NonFinite>,
    /// Whether its type is one whose values were looked at.
    pub values_checked: bool,
}

/// Reads all tensors in the order of the table. `progress` is called with the bytes read since the
/// last call.
///
/// # Errors
/// The data of a tensor is cut.
pub fn verify(
    gguf: &Gguf,
    algorithm: Algorithm,
    mut progress: impl FnMut(u64),
) -> Result<Vec<Verified>, Error> {
    let mut verified = Vec::with_capacity(gguf.tensors().len());
    for tensor in gguf.tensors() {
        let data = gguf.data(tensor)?;
        let hash = hash(algorithm, data, &mut progress);
        let found = non_finite(tensor, data);
        verified.push(Verified {
            tensor: tensor.index,
            hash,
            values_checked: found.is_some(),
            impossible: found.flatten(),
        });
    }
    Ok(verified)
}

fn hash(algorithm: Algorithm, data: &[u8], progress: &mut impl FnMut(u64)) -> String {
    let (mut xxh3, mut sha256) = (Xxh3::new(), Sha256::new());
    for piece in data.chunks(PIECE) {
        match algorithm {
            Algorithm::Xxh3 => xxh3.update(piece),
            Algorithm::Sha256 => sha256.update(piece),
        }
        progress(piece.len() as u64);
    }
    match algorithm {
        Algorithm::Xxh3 => format!("{:016x}", xxh3.digest()),
        Algorithm::Sha256 => sha256
            .finalize()
            .iter()
            .fold(String::new(), |mut text, byte| {
                let _ = write!(text, "{byte:02x}"); // memory takes every write
                text
            }),
    }
}

/// The manifest of a model, in the form of llama.cpp's `gguf-hash`: a line `HASH-NAME  HASH
/// FILE:TENSOR` for every tensor.
pub fn manifest(gguf: &Gguf, algorithm: Algorithm, verified: &[Verified]) -> String {
    let mut text = String::new();
    for entry in verified {
        if let Some(tensor) = gguf.tensors().get(entry.tensor as usize) {
            let file = gguf
                .files()
                .get(usize::from(tensor.file))
                .map_or("", |file| &file.name);
            let _ = writeln!(text, "{algorithm}  {}  {file}:{}", entry.hash, tensor.name);
        }
    }
    text
}

/// A line of a manifest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ManifestEntry {
    /// Which hash.
    pub algorithm: Algorithm,
    /// The hash, in lower-case hexadecimal digits.
    pub hash: String,
    /// The tensor's name.
    pub tensor: String,
}

/// What makes a line of a manifest unusable.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("line {line} of the manifest: {problem}")]
pub struct ManifestError {
    /// The line, from 1.
    pub line: usize,
    /// What is wrong with it.
    #[source]
    pub problem: ManifestProblem,
}

/// What is wrong with a line of a manifest.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ManifestProblem {
    /// It has another form.
    #[error("not of the form HASH-NAME  HASH  FILE:TENSOR")]
    Form,
    /// Its hash is not supported.
    #[error(transparent)]
    Algorithm(#[from] UnknownAlgorithm),
}

/// Reads a manifest. The files' names in it may differ from those of the model that it is to be
/// checked against; the tensors' names count. Empty lines and those beginning with `#` are skipped,
/// and so is what `gguf-hash` writes beside the hashes of tensors that are known here: its other
/// hashes, and those of a whole file.
///
/// # Errors
/// A line has another form, or names a hash that nobody knows.
pub fn parse_manifest(gguf: &Gguf, text: &str) -> Result<Vec<ManifestEntry>, ManifestError> {
    let mut entries = Vec::new();
    for (i, line) in strip_byte_order_mark(text).lines().enumerate() {
        if line.trim().is_empty() || line.starts_with('#') {
            continue;
        }
        let entry = parse_line(gguf.files(), line);
        entries.extend(entry.map_err(|problem| ManifestError {
            line: i + 1,
            problem,
        })?);
    }
    Ok(entries)
}

/// The entry on a line; none on a line of `gguf-hash` that is of no use here.
fn parse_line(files: &[GgufFile], line: &str) -> Result<Option<ManifestEntry>, ManifestProblem> {
    let form = || ManifestProblem::Form;
    let (algorithm, rest) = line.split_once(char::is_whitespace).ok_or_else(form)?;
    let (hash, place) = rest
        .trim_start()
        .split_once(char::is_whitespace)
        .ok_or_else(form)?;
    let place = place.trim_start();
    if place.ends_with(".gguf") || ["xxh64", "sha1", "uuid"].contains(&algorithm) {
        return Ok(None);
    }
    // Names may hold colons, so the model's own files are tried first.
    let own = files
        .iter()
        .find_map(|file| place.strip_prefix(&file.name)?.strip_prefix(':'));
    let tensor = own
        .or_else(|| Some(place.rsplit_once(':')?.1))
        .ok_or_else(form)?;
    Ok(Some(ManifestEntry {
        algorithm: algorithm.parse()?,
        hash: hash.to_ascii_lowercase(),
        tensor: tensor.to_owned(),
    }))
}

/// A difference between a model and a manifest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "difference", rename_all = "snake_case")]
pub enum Difference {
    /// The tensor's data is another.
    Changed {
        /// The tensor.
        tensor: String,
        /// Hash in the manifest.
        expected: String,
        /// Hash of the data.
        found: String,
    },
    /// The manifest has the tensor, the model has not.
    Missing {
        /// The tensor.
        tensor: String,
    },
    /// The model has the tensor, the manifest has not.
    Unlisted {
        /// The tensor.
        tensor: String,
    },
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Difference::Changed {
                tensor,
                expected,
                found,
            } => {
                write!(
                    f,
                    "{tensor:?} has changed: its hash is {found}, the manifest says {expected}"
                )
            }
            Difference::Missing { tensor } => {
                write!(f, "{tensor:?} is in the manifest, but not in the model")
            }
            Difference::Unlisted { tensor } => {
                write!(f, "{tensor:?} is in the model, but not in the manifest")
            }
        }
    }
}

/// Compares what was read, with `algorithm`, with the entries of a manifest made with it. Entries of
/// another algorithm are left out of account.
pub fn compare(
    gguf: &Gguf,
    algorithm: Algorithm,
    verified: &[Verified],
    manifest: &[ManifestEntry],
) -> Vec<Difference> {
    let mut hashes = vec![None; gguf.tensors().len()];
    for entry in verified {
        if let Some(hash) = hashes.get_mut(entry.tensor as usize) {
            *hash = Some(&entry.hash);
        }
    }
    let mut listed = vec![false; gguf.tensors().len()];
    let mut differences = Vec::new();
    for entry in manifest.iter().filter(|entry| entry.algorithm == algorithm) {
        let Some(tensor) = gguf.tensor(&entry.tensor) else {
            differences.push(Difference::Missing {
                tensor: entry.tensor.clone(),
            });
            continue;
        };
        listed[tensor.index as usize] = true;
        if let Some(found) = hashes[tensor.index as usize].filter(|found| **found != entry.hash) {
            differences.push(Difference::Changed {
                tensor: entry.tensor.clone(),
                expected: entry.hash.clone(),
                found: found.clone(),
            });
        }
    }
    let unlisted = gguf
        .tensors()
        .iter()
        .zip(listed)
        .filter(|(_, listed)| !listed);
    differences.extend(unlisted.map(|(t, _)| Difference::Unlisted {
        tensor: t.name.clone(),
    }));
    differences
}
