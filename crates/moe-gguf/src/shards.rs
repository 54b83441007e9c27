//! Models in several files (shards), as written by llama.cpp's `gguf-split`.
//!
//! Each shard `NAME-00001-of-00003.gguf` is a GGUF file. The keys `split.no`, `split.count` and `split.tensors.count` connect
//! them.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use crate::bytes::Bytes;
use crate::error::{Error, ShardFault};
use crate::gguf::{GgufFile, Tensor};
use crate::header::Header;
use crate::metadata::Metadata;

/// Maximum number of shards: `split.count` has 16 bits.
const MAX_SHARDS: u64 = 65_535;

/// A file of a model with its parsed header. The tensor indices start at 0.
#[derive(Debug)]
pub(crate) struct Part {
    pub(crate) version: u32,
    pub(crate) metadata: Metadata,
    pub(crate) file: GgufFile,
    pub(crate) tensors: Vec<Tensor>,
}

impl Part {
    pub(crate) fn open(path: &Path) -> Result<Part, Error> {
        let bytes = Bytes::map(path).map_err(Error::io(path, "open the file"))?;
        Part::parse(path, bytes)
    }

    pub(crate) fn parse(path: &Path, bytes: Bytes) -> Result<Part, Error> {
        let header = Header::parse(path, &bytes)?;
        let name = path.file_name().unwrap_or(path.as_os_str());
        let file = GgufFile {
            path: path.to_owned(),
            name: name.to_string_lossy().into_owned(),
            size_bytes: bytes.as_slice().len() as u64,
            header_size: header.size,
            data_offset: header.data_offset,
            alignment: header.alignment,
            bytes,
        };
        Ok(Part {
            version: header.version,
            metadata: header.metadata,
            file,
            tensors: header.tensors,
        })
    }

    fn fault(&self, fault: ShardFault) -> Error {
        Error::Shard {
            path: self.file.path.clone(),
            fault,
        }
    }
}

/// The `split.*` keys of a file.
struct Split {
    /// Index of the shard, which starts at 0 (`split.no`).
    index: u64,
    /// Number of shards (`split.count`); 1 for a model in one file.
    count: u64,
    /// Number of tensors of all shards together (`split.tensors.count`).
    n_tensors: Option<u64>,
}

impl Split {
    fn of(metadata: &Metadata) -> Result<Split, Error> {
        Ok(Split {
            index: metadata.u64("split.no")?.unwrap_or(0),
            count: metadata.u64("split.count")?.unwrap_or(1).max(1),
            n_tensors: metadata.u64("split.tensors.count")?,
        })
    }
}

/// Opens all shards of the model of `part`. Returns the first shard, and the others in their order.
pub(crate) fn gather(part: Part) -> Result<(Part, Vec<Part>), Error> {
    let split = Split::of(&part.metadata)?;
    let count = split.count;
    if count == 1 {
        return Ok((part, Vec::new()));
    }
    if count > MAX_SHARDS {
        return Err(part.fault(ShardFault::TooMany {
            count,
            limit: MAX_SHARDS,
        }));
    }
    // Shard numbers start at 0 in `split.no`, and at 1 in file names.
    let path = part.file.path.clone();
    let Some((prefix, own)) = split_name(&path, count) else {
        let number = split.index.saturating_add(1);
        return Err(part.fault(ShardFault::Unnamed { number, count }));
    };

    let mut opened = Some(part);
    let mut shard = |number: u64| {
        let part = match opened.take_if(|_| number == own) {
            Some(part) => part,
            None => open_shard(
                &path.with_file_name(shard_name(&prefix, number, count)),
                number,
                count,
            )?,
        };
        compare(&part, number, &split, &path)?;
        Ok(part)
    };
    let first = shard(1)?;
    let others = (2..=count)
        .map(shard)
        .collect::<Result<Vec<Part>, Error>>()?;
    for part in &others {
        compare_models(part, &first)?;
    }

    let found = others
        .iter()
        .map(|part| part.tensors.len() as u64)
        .sum::<u64>()
        + first.tensors.len() as u64;
    match split.n_tensors {
        Some(expected) if expected != found => {
            Err(first.fault(ShardFault::TensorCount { found, expected }))
        }
        _ => Ok((first, others)),
    }
}

fn open_shard(path: &Path, number: u64, count: u64) -> Result<Part, Error> {
    match path.try_exists() {
        Ok(false) => {
            let fault = ShardFault::Missing { number, count };
            Err(Error::Shard {
                path: path.to_owned(),
                fault,
            })
        }
        _ => Part::open(path),
    }
}

/// Checks that the `split.*` keys of a shard match its file name, and those of the shard that was opened first.
fn compare(part: &Part, number: u64, expected: &Split, first: &Path) -> Result<(), Error> {
    let split = Split::of(&part.metadata)?;
    let foreign = |key, found: String, expected: String| {
        part.fault(ShardFault::Foreign {
            first: first.to_owned(),
            key,
            found,
            expected,
        })
    };
    if split.count != expected.count {
        return Err(foreign(
            "split.count",
            split.count.to_string(),
            expected.count.to_string(),
        ));
    }
    if split.n_tensors != expected.n_tensors {
        let text = |n: Option<u64>| n.map_or("absent".to_owned(), |n| n.to_string());
        return Err(foreign(
            "split.tensors.count",
            text(split.n_tensors),
            text(expected.n_tensors),
        ));
    }
    match split.index.checked_add(1) {
        Some(found) if found == number => Ok(()),
        found => Err(part.fault(ShardFault::Repeated {
            number,
            found: found.unwrap_or(u64::MAX),
        })),
    }
}

/// Checks that the model keys of a shard, if it has any, are equal to those of the first shard.
fn compare_models(part: &Part, first: &Part) -> Result<(), Error> {
    for key in ["general.architecture", "general.name"] {
        let (found, expected) = (part.metadata.str(key)?, first.metadata.str(key)?);
        if let (Some(found), Some(expected)) = (found, expected)
            && found != expected
        {
            return Err(part.fault(ShardFault::Foreign {
                first: first.file.path.clone(),
                key,
                found: format!("{found:?}"),
                expected: format!("{expected:?}"),
            }));
        }
    }
    Ok(())
}

/// Returns the paths of all shards of the model to which the shard `path` belongs.
///
/// Does not access the files: the number of shards is taken from the file name. Returns an empty list if `path` does not have
/// the file name of a shard.
pub fn shard_paths(path: &Path) -> Vec<PathBuf> {
    let count = path.file_name().and_then(OsStr::to_str).and_then(|name| {
        let (_, count) = name.strip_suffix(".gguf")?.rsplit_once("-of-")?;
        count.parse().ok().filter(|&count| count <= MAX_SHARDS)
    });
    let Some((count, (prefix, _))) =
        count.and_then(|count| Some((count, split_name(path, count)?)))
    else {
        return Vec::new();
    };
    let name = |number| shard_name(&prefix, number, count);
    (1..=count)
        .map(|number| path.with_file_name(name(number)))
        .collect()
}

fn shard_name(prefix: &str, number: u64, count: u64) -> String {
    format!("{prefix}-{number:05}-of-{count:05}.gguf")
}

/// Splits `NAME-00002-of-00003.gguf` into `NAME` and 2, if the last number is `count`.
fn split_name(path: &Path, count: u64) -> Option<(String, u64)> {
    let name = path
        .file_name()?
        .to_str()?
        .strip_suffix(&format!("-of-{count:05}.gguf"))?;
    let (prefix, number) = name.rsplit_once('-')?;
    let number: u64 = number.parse().ok()?;
    let is_shard = (1..=count).contains(&number)
        && path.file_name()?.to_str()? == shard_name(prefix, number, count);
    is_shard.then(|| (prefix.to_owned(), number))
}
