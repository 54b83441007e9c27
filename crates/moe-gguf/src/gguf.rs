//! A model: all its files, mapped, and what their headers say.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use xxhash_rust::xxh3::Xxh3;

use crate::bytes::Bytes;
use crate::error::{Error, Fault};
use crate::format::MAX_I64;
use crate::map::{MAX_EXPERT_ROWS, n_stacked};
use crate::metadata::Metadata;
use crate::shards::{self, Part};
use crate::types::GgmlType;

/// A tensor of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Name, `blk.3.ffn_gate_exps.weight`.
    pub name: String,
    /// Index in the model's tensor table; shards are counted on.
    pub index: u32,
    /// Index of its file in [`Gguf::files`].
    pub file: u16,
    /// Type of its elements.
    pub ty: GgmlType,
    /// Dimensions that the file lists, 0 to 4.
    pub n_dims: u32,
    /// Elements in each dimension, innermost first; 1 beyond `n_dims`.
    pub ne: [u64; 4],
    /// First byte of its data, counted from the start of its file.
    pub offset: u64,
    /// Bytes of its data.
    pub size_bytes: u64,
}

/// One file of a model.
#[derive(Clone, Debug)]
pub struct GgufFile {
    /// Path as it was opened; for an embedded model, its name.
    pub path: PathBuf,
    /// Last part of the path.
    pub name: String,
    /// Bytes that the file has.
    pub size_bytes: u64,
    /// Bytes of its header: one past the last byte of the tensor table.
    pub header_size: u64,
    /// First byte of its data section: the header's size, padded.
    pub data_offset: u64,
    /// `general.alignment`, 32 where the file has none.
    pub alignment: u64,
    pub(crate) bytes: Bytes,
}

impl GgufFile {
    /// All bytes of the file.
    pub fn contents(&self) -> &[u8] {
        self.bytes.as_slice()
    }
}

/// A model: all its files memory mapped, their headers parsed once.
#[derive(Debug)]
pub struct Gguf {
    version: u32,
    metadata: Metadata,
    files: Vec<GgufFile>,
    tensors: Vec<Tensor>,
    /// Indices into `tensors`, sorted by name.
    by_name: Vec<u32>,
}

impl Gguf {
    /// Opens the model at `path`; of a model in several files, any of them.
    ///
    /// A file whose data is cut opens all the same: its map is what tells how much is missing.
    ///
    /// # Errors
    /// A file cannot be read, its header breaks a rule of the format, or a shard is missing,
    /// repeated or of another model.
    pub fn open(path: impl AsRef<Path>) -> Result<Gguf, Error> {
        let (first, others) = shards::gather(Part::open(path.as_ref())?)?;
        Self::from_parts(first, others)
    }

    /// Opens a model that is embedded in the binary; `name` stands for its path. It must be whole in
    /// one file.
    ///
    /// # Errors
    /// The header breaks a rule of the format.
    pub fn from_static(name: &str, bytes: &'static [u8]) -> Result<Gguf, Error> {
        let part = Part::parse(Path::new(name), Bytes::Static(bytes))?;
        Self::from_parts(part, Vec::new())
    }

    /// Opens a model that is held in memory; `name` stands for its path. It must be whole in one
    /// file.
    ///
    /// # Errors
    /// The header breaks a rule of the format.
    pub fn from_bytes(name: &str, bytes: impl Into<Arc<[u8]>>) -> Result<Gguf, Error> {
        let part = Part::parse(Path::new(name), Bytes::Owned(bytes.into()))?;
        Self::from_parts(part, Vec::new())
    }

    fn from_parts(first: Part, others: Vec<Part>) -> Result<Gguf, Error> {
        let path = first.file.path.clone();
        let mut files = vec![first.file];
        let mut tensors = first.tensors;
        for (file, part) in (1..).zip(others) {
            let index = u32::try_from(tensors.len()).expect("headers limit the number of tensors");
            let renumber = |t: Tensor| Tensor {
                file,
                index: index + t.index,
                ..t
            };
            tensors.extend(part.tensors.into_iter().map(renumber));
            files.push(part.file);
        }
        let by_name = sort_by_name(&tensors).and_then(|by_name| limit(&tensors).map(|()| by_name));
        let by_name = by_name.map_err(|fault| Error::Model {
            path,
            fault: Box::new(fault),
        })?;
        Ok(Gguf {
            version: first.version,
            metadata: first.metadata,
            files,
            tensors,
            by_name,
        })
    }

    /// Version of the GGUF format, 2 or 3.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// The model's key-values.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// The tensors in the order of the table; a tensor's place here is its `tensor_idx`.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// The tensor of that name.
    pub fn tensor(&self, name: &str) -> Option<&Tensor> {
        let tensor = |i: u32| &self.tensors[i as usize];
        let found = self
            .by_name
            .binary_search_by(|&i| tensor(i).name.as_str().cmp(name))
            .ok()?;
        Some(tensor(self.by_name[found]))
    }

    /// The data of a tensor, borrowed from the mapped file.
    ///
    /// # Errors
    /// The file ends before the data does.
    pub fn data(&self, tensor: &Tensor) -> Result<&[u8], Error> {
        if tensor.size_bytes == 0 {
            return Ok(&[]); // nothing lies nowhere, beyond the end of the file too
        }
        let file = self.files.get(usize::from(tensor.file));
        file.and_then(|file| file.bytes.range(tensor.offset, tensor.size_bytes))
            .ok_or_else(|| Error::Cut {
                path: file.map(|file| file.path.clone()).unwrap_or_default(),
                tensor: tensor.name.clone(),
                offset: tensor.offset,
                end: tensor.offset.saturating_add(tensor.size_bytes),
                file_size: file.map_or(0, |file| file.size_bytes),
            })
    }

    /// The files of the model, in the order of their split numbers.
    pub fn files(&self) -> &[GgufFile] {
        &self.files
    }

    /// XXH3 (64 bits) of the headers of all files, one after the other: names a model without
    /// reading its data.
    pub fn header_xxh3(&self) -> u64 {
        let mut hash = Xxh3::new();
        for file in &self.files {
            hash.update(file.bytes.range(0, file.header_size).unwrap_or_default());
        }
        hash.digest()
    }
}

/// Refuses a model whose map would be out of all proportion to its headers, or whose sizes do not
/// add up in 63 bits over all its files.
fn limit(tensors: &[Tensor]) -> Result<(), Fault> {
    let mut claimed: u64 = 0;
    for tensor in tensors {
        claimed = claimed.saturating_add(n_stacked(tensor).unwrap_or(0));
        if claimed > MAX_EXPERT_ROWS {
            return Err(Fault::TooManyExperts {
                tensor: tensor.name.clone(),
                claimed,
                limit: MAX_EXPERT_ROWS,
            });
        }
    }
    let total = tensors
        .iter()
        .fold(0, |sum: u64, t| sum.saturating_add(t.size_bytes));
    if total > MAX_I64 {
        Err(Fault::TotalOverflow)
    } else {
        Ok(())
    }
}

/// Indices of the tensors, sorted by name; a name that appears twice is refused.
fn sort_by_name(tensors: &[Tensor]) -> Result<Vec<u32>, Fault> {
    let name = |i: u32| tensors[i as usize].name.as_str();
    let mut by_name: Vec<u32> = (0..).take(tensors.len()).collect();
    by_name.sort_unstable_by(|&a, &b| name(a).cmp(name(b)));
    match by_name
        .windows(2)
        .find(|pair| name(pair[0]) == name(pair[1]))
    {
        Some(pair) => Err(Fault::DuplicateTensor {
            tensor: name(pair[0]).to_owned(),
        }),
        None => Ok(by_name),
    }
}
