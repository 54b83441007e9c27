//! Checks of tensor data: hashes, manifests of hashes, and values that are not finite.
//!
//! Data is read through the memory mapping in chunks, so a model may be larger than the memory.

use std::borrow::Cow;
use std::fmt::{self, Write as _};
use std::str::FromStr;

use moe_files::text::strip_byte_order_mark;
use serde::Serialize;
use sha2::{Digest, Sha256};
use thiserror::Error;
use xxhash_rust::xxh3::Xxh3;

use crate::error::Error;
use crate::gguf::{Gguf, GgufFile, Tensor};
use crate::non_finite::{NonFinite, non_finite};

/// Bytes read between two calls of `progress`.
const CHUNK_SIZE: usize = 16 << 20;

/// A hash algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Algorithm {
    /// XXH3 with 64 bits: fast; detects accidental changes.
    Xxh3,
    /// SHA-256: slow; also detects intentional changes.
    Sha256,
}

impl Algorithm {
    /// The name in manifests.
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

/// A hash algorithm that is not supported.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("hash {name:?} is not supported; use xxh3 or sha256")]
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

/// The result of [`verify`] for a tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct VerifiedTensor {
    /// Index of the tensor in [`Gguf::tensors`].
    pub tensor: u32,
    /// Hash of its data, in lower-case hexadecimal digits.
    pub hash: String,
    /// Values that are not finite; `None` if all are finite or the type cannot be checked.
    #[serde(rename = "impossible")]
    pub non_finite: Option<NonFinite>,
    /// Whether values that are not finite can be recognized in this type.
    pub values_checked: bool,
}

/// Reads and checks all tensors in the order of the tensor table. Calls `progress` repeatedly with the number of bytes read since
/// its last call.
///
/// # Errors
/// [`Error::Truncated`] if the data of a tensor is not completely inside its file.
pub fn verify(
    gguf: &Gguf,
    algorithm: Algorithm,
    mut progress: impl FnMut(u64),
) -> Result<Vec<VerifiedTensor>, Error> {
    let mut verified = Vec::with_capacity(gguf.tensors().len());
    for tensor in gguf.tensors() {
        let data = gguf.data(tensor)?;
        let hash = hash(algorithm, data, &mut progress);
        let found = non_finite(tensor, data);
        verified.push(VerifiedTensor {
            tensor: tensor.index,
            hash,
            values_checked: found.is_some(),
            non_finite: found.flatten(),
        });
    }
    Ok(verified)
}

fn hash(algorithm: Algorithm, data: &[u8], progress: &mut impl FnMut(u64)) -> String {
    let (mut xxh3, mut sha256) = (Xxh3::new(), Sha256::new());
    for chunk in data.chunks(CHUNK_SIZE) {
        match algorithm {
            Algorithm::Xxh3 => xxh3.update(chunk),
            Algorithm::Sha256 => sha256.update(chunk),
        }
        progress(chunk.len() as u64);
    }
    match algorithm {
        Algorithm::Xxh3 => format!("{:016x}", xxh3.digest()),
        Algorithm::Sha256 => sha256
            .finalize()
            .iter()
            .fold(String::new(), |mut text, byte| {
                let _ = write!(text, "{byte:02x}"); // Writing to a string cannot fail.
                text
            }),
    }
}

/// Returns the manifest of a model in the format of llama.cpp's `gguf-hash`: a line `ALGORITHM  HASH  FILE:TENSOR` per tensor.
pub fn manifest(gguf: &Gguf, algorithm: Algorithm, verified: &[VerifiedTensor]) -> String {
    let mut text = String::new();
    for entry in verified {
        if let Some(tensor) = gguf.tensors().get(entry.tensor as usize) {
            let file = gguf
                .files()
                .get(usize::from(tensor.file))
                .map_or("", |file| &file.name);
            let (file, name) = (on_one_line(file), on_one_line(&tensor.name));
            let _ = writeln!(text, "{algorithm}  {}  {file}:{name}", entry.hash);
        }
    }
    text
}

/// A name as a manifest contains it: names with line breaks are escaped.
fn on_one_line(name: &str) -> Cow<'_, str> {
    if name.contains(['\n', '\r']) {
        name.escape_debug().to_string().into()
    } else {
        name.into()
    }
}

/// A line of a manifest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ManifestEntry {
    /// The hash algorithm.
    pub algorithm: Algorithm,
    /// The hash, in lower-case hexadecimal digits.
    pub hash: String,
    /// The name of the tensor. Names with line breaks are escaped.
    pub tensor: String,
}

/// An invalid line of a manifest.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("line {line} of the manifest: {problem}")]
pub struct ManifestError {
    /// The line number, which starts at 1.
    pub line: usize,
    /// What is wrong with it.
    #[source]
    pub problem: ManifestProblem,
}

/// What is wrong with a line of a manifest.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ManifestProblem {
    /// The line has another format.
    #[error(
        "the line does not have the format ALGORITHM  HASH  FILE:TENSOR; use a manifest in the format of llama.cpp's gguf-hash"
    )]
    Format,
    /// Its hash algorithm is not supported.
    #[error(transparent)]
    Algorithm(#[from] UnknownAlgorithm),
}

/// Parses a manifest.
///
/// File names may differ from those of the model; tensors are identified by tensor name. Skips empty lines, lines that start
/// with `#`, and lines of `gguf-hash` with other algorithms (xxh64, sha1, uuid) or for complete files.
///
/// # Errors
/// [`ManifestError`] for the first line that has another format or an unknown hash algorithm.
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

/// Parses a line. Returns `None` for lines of `gguf-hash` that are skipped.
fn parse_line(files: &[GgufFile], line: &str) -> Result<Option<ManifestEntry>, ManifestProblem> {
    let invalid = || ManifestProblem::Format;
    let (algorithm, rest) = line.split_once(char::is_whitespace).ok_or_else(invalid)?;
    let (hash, target) = rest
        .trim_start()
        .split_once(char::is_whitespace)
        .ok_or_else(invalid)?;
    let target = target.trim_start();
    // Names may contain colons, so the names of the model's files are tried first.
    let own = files.iter().find_map(|file| {
        let rest = target.strip_prefix(&*on_one_line(&file.name))?;
        rest.strip_prefix(':')
    });
    let is_file = own.is_none() && target.ends_with(".gguf");
    if is_file || ["xxh64", "sha1", "uuid"].contains(&algorithm) {
        return Ok(None);
    }
    let tensor = own
        .or_else(|| Some(target.rsplit_once(':')?.1))
        .ok_or_else(invalid)?;
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
    /// The hash of the tensor's data differs.
    Changed {
        /// The tensor.
        tensor: String,
        /// Hash in the manifest.
        expected: String,
        /// Hash of the data.
        found: String,
    },
    /// The tensor is in the manifest, but not in the model.
    Missing {
        /// The tensor.
        tensor: String,
    },
    /// The tensor is in the model, but not in the manifest.
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
                    "{tensor:?} has changed: its hash is {found}, in the manifest {expected}"
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

/// Returns the differences between the results of [`verify`] and a manifest. Entries of another algorithm are ignored.
pub fn compare(
    gguf: &Gguf,
    algorithm: Algorithm,
    verified: &[VerifiedTensor],
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
        let is_escaped = |tensor: &&Tensor| on_one_line(&tensor.name) == entry.tensor;
        let tensor = gguf.tensor(&entry.tensor);
        let Some(tensor) = tensor.or_else(|| gguf.tensors().iter().find(is_escaped)) else {
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
