//! A GGUF model: its mapped files, metadata and tensor table.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use xxhash_rust::xxh3::Xxh3;

use crate::bytes::Bytes;
use crate::error::{Error, Fault};
use crate::format::MAX_I64;
use crate::metadata::Metadata;
use crate::names::Role;
use crate::shards::{self, Part};
use crate::types::GgmlType;

/// Maximum number of expert slices of a model. A header of a few bytes can declare any number of experts, and a sparse file
/// can seem to contain them. The largest current models have about 70,000 slices; 96 layers with 3 × 1024 have 294,912.
pub const MAX_EXPERT_ROWS: u64 = 5 << 16;

/// A tensor of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Name, for example `blk.3.ffn_gate_exps.weight`.
    pub name: String,
    /// Index in the tensor table of the model. The indices of a shard continue those of the preceding shard.
    pub index: u32,
    /// Index of its file in [`Gguf::files`].
    pub file: u16,
    /// Type of its elements.
    pub ty: GgmlType,
    /// Number of dimensions in the file, 0 to 4.
    pub n_dims: u32,
    /// Number of elements in each dimension, innermost first; 1 for dimensions that the file does not list.
    pub ne: [u64; 4],
    /// Offset of its data from the start of its file, in bytes.
    pub offset: u64,
    /// Size of its data in bytes.
    pub size_bytes: u64,
}

impl Tensor {
    /// Returns the number of experts in a stacked tensor (`ne[2]`), or `None` if the tensor is one row of the
    /// [offset map](crate::map::OffsetMap).
    ///
    /// A tensor is stacked if it has the name of stacked expert weights and three dimensions.
    pub fn n_stacked(&self) -> Option<u64> {
        let [_, _, n_expert, rest] = self.ne;
        (self.n_dims >= 3 && rest == 1 && n_expert > 0 && Role::of(&self.name).stacked)
            .then_some(n_expert)
    }
}

/// One file of a model.
#[derive(Clone, Debug)]
pub struct GgufFile {
    /// Path at which the file was opened; for a model in memory, its name.
    pub path: PathBuf,
    /// File name without directories.
    pub name: String,
    /// Size of the file in bytes.
    pub size_bytes: u64,
    /// Size of its header in bytes, which ends with the tensor table.
    pub header_size: u64,
    /// Offset of its data section in bytes: the header size, padded to the alignment.
    pub data_offset: u64,
    /// Alignment in bytes: `general.alignment`, or 32 if the key is missing.
    pub alignment: u64,
    pub(crate) bytes: Bytes,
}

impl GgufFile {
    /// All bytes of the file.
    pub fn contents(&self) -> &[u8] {
        self.bytes.as_slice()
    }
}

/// A model: its memory-mapped files, and their parsed headers.
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
    /// Opens the model at `path`. For a model in several files, `path` may be any of them.
    ///
    /// A file with truncated data can be opened; [`check`](crate::check::check) reports the missing bytes.
    ///
    /// The files are memory-mapped. If another process truncates a file, an access to its missing bytes raises SIGBUS.
    ///
    /// # Errors
    /// A file cannot be read; its header violates a rule of the format; a shard is missing, repeated or belongs to another
    /// model.
    pub fn open(path: impl AsRef<Path>) -> Result<Gguf, Error> {
        let (first, others) = shards::gather(Part::open(path.as_ref())?)?;
        Self::from_parts(first, others)
    }

    /// Opens a model that is embedded in the binary. `name` is used as its path. The model must be a single file.
    ///
    /// # Errors
    /// The header violates a rule of the format.
    pub fn from_static(name: &str, bytes: &'static [u8]) -> Result<Gguf, Error> {
        let part = Part::parse(Path::new(name), Bytes::Static(bytes))?;
        Self::from_parts(part, Vec::new())
    }

    /// Opens a model in memory. `name` is used as its path. The model must be a single file.
    ///
    /// # Errors
    /// The header violates a rule of the format.
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

    /// The tensors in the order of the tensor table. The index in this slice is the `tensor_idx` of tables.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// Returns the tensor with this name.
    pub fn tensor(&self, name: &str) -> Option<&Tensor> {
        let tensor = |i: u32| &self.tensors[i as usize];
        let found = self
            .by_name
            .binary_search_by(|&i| tensor(i).name.as_str().cmp(name))
            .ok()?;
        Some(tensor(self.by_name[found]))
    }

    /// Returns the data of a tensor, borrowed from the mapped file.
    ///
    /// # Errors
    /// [`Error::Truncated`] if the data is not completely inside the file.
    pub fn data(&self, tensor: &Tensor) -> Result<&[u8], Error> {
        if tensor.size_bytes == 0 {
            return Ok(&[]); // An empty tensor may have an offset past the end of the file.
        }
        let file = self.files.get(usize::from(tensor.file));
        file.and_then(|file| file.bytes.range(tensor.offset, tensor.size_bytes))
            .ok_or_else(|| Error::Truncated {
                path: file.map(|file| file.path.clone()).unwrap_or_default(),
                tensor: tensor.name.clone(),
                offset: tensor.offset,
                end: tensor.offset.saturating_add(tensor.size_bytes),
                file_size: file.map_or(0, |file| file.size_bytes),
            })
    }

    /// The files of the model, in the order of `split.no`.
    pub fn files(&self) -> &[GgufFile] {
        &self.files
    }

    /// Returns the 64-bit XXH3 hash of the concatenated headers of all files. It identifies a model without reading its data.
    pub fn header_xxh3(&self) -> u64 {
        let mut hash = Xxh3::new();
        for file in &self.files {
            hash.update(file.bytes.range(0, file.header_size).unwrap_or_default());
        }
        hash.digest()
    }
}

/// Rejects a model whose offset map would be much larger than its headers, or whose tensor sizes add up to 2^63 or more.
fn limit(tensors: &[Tensor]) -> Result<(), Fault> {
    let mut claimed: u64 = 0;
    for tensor in tensors {
        claimed = claimed.saturating_add(tensor.n_stacked().unwrap_or(0));
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

/// Returns the indices of the tensors sorted by name. Rejects duplicate names.
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
