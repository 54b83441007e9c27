//! Files of `torch.save`: a ZIP archive with a pickle (`NAME/data.pkl`) and the bytes of each storage (`NAME/data/KEY`).
//!
//! PyTorch does not compress the entries, so a tensor is a view of the file. The pickle is parsed without executing anything
//! ([`super::pickle`]).
//!
//! Format: <https://pytorch.org/docs/stable/notes/serialization.html>

use std::cell::Cell;
use std::collections::HashMap;
use std::ops::Range;

use rawzip::{CompressionMethod, ZipArchive};

use super::array::{Array, ElementType};
use super::error::BinaryError;
use super::pickle::{Global, Node, Pickle, Value};

/// First bytes of a ZIP archive.
const ZIP: &[u8] = b"PK\x03\x04";
/// First bytes of a file of PyTorch before 1.6, which is not an archive.
const LEGACY: &[u8] = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.";

/// Maximum number of tensor elements that are read, relative to the size of the file in bytes.
const MAX_VIEWS: usize = 16;

/// Whether a file that starts with `sample` was saved by PyTorch: its first entry is the pickle.
pub(crate) fn is_applicable(sample: &[u8]) -> bool {
    let name = sample
        .get(26..28)
        .map(|length| usize::from(u16::from_le_bytes([length[0], length[1]])))
        .and_then(|length| sample.get(30..)?.get(..length));
    sample.starts_with(LEGACY)
        || sample.starts_with(ZIP) && name.is_some_and(|name| name.ends_with(b"/data.pkl"))
}

/// A file of `torch.save`.
#[derive(Debug)]
pub(crate) struct TorchFile<'a> {
    bytes: &'a [u8],
    /// Byte ranges of the storages, by key.
    storages: HashMap<String, Range<usize>>,
    big_endian: bool,
    pickle: Pickle<'a>,
    pickle_start: usize,
    /// Number of elements of all tensors that [`TorchFile::tensor`] returned.
    n_viewed: Cell<usize>,
}

impl<'a> TorchFile<'a> {
    /// Reads the directory of the archive and the pickle.
    pub(crate) fn open(bytes: &'a [u8]) -> Result<Self, BinaryError> {
        if bytes.starts_with(LEGACY) {
            return Err(BinaryError::at(
                0,
                "the legacy format of PyTorch before 1.6 is not supported; load the file and save it again with torch.save",
            ));
        }
        let entries = entries(bytes)?;
        let pickled = |name: &str| name.strip_suffix("/data.pkl").map(str::to_owned);
        let Some(folder) = entries.keys().find_map(|name| pickled(name)) else {
            return Err(BinaryError::at(
                0,
                "the archive contains no data.pkl, so torch.save did not write it; use a file of torch.save",
            ));
        };
        let part = |name: &str| entries.get(&format!("{folder}/{name}")).cloned();
        let place = part("data.pkl").unwrap_or_default();
        let byteorder = part("byteorder").and_then(|place| bytes.get(place));
        let data = format!("{folder}/data/");
        let pickle_start = place.start;
        let pickle =
            Pickle::read(bytes.get(place).unwrap_or_default()).map_err(|error| BinaryError {
                offset: error.offset + pickle_start as u64,
                ..error
            })?;
        Ok(Self {
            bytes,
            big_endian: byteorder.is_some_and(|order| order == b"big"),
            storages: entries
                .iter()
                .filter_map(|(name, place)| {
                    Some((name.strip_prefix(&data)?.to_owned(), place.clone()))
                })
                .collect(),
            pickle,
            pickle_start,
            n_viewed: Cell::new(0),
        })
    }

    /// The saved object.
    pub(crate) fn pickle(&self) -> &Pickle<'a> {
        &self.pickle
    }

    /// An error about the saved object, located at the start of the pickle.
    pub(crate) fn error(&self, reason: impl Into<String>) -> BinaryError {
        BinaryError::at(self.pickle_start, reason)
    }

    /// The tensor that `value` represents; `None` if it is not a tensor.
    pub(crate) fn tensor(&self, value: Value) -> Option<Result<Array<'a>, BinaryError>> {
        let arguments = |value| match self.pickle.node(value) {
            Some(&Node::Call(global, arguments)) => {
                Some((global, self.pickle.list(arguments).unwrap_or_default()))
            }
            _ => None,
        };
        match arguments(value)? {
            (Global::RebuildTensor, parts) => Some(self.view(parts)),
            (Global::RebuildParameter, parts) => match arguments(*parts.first()?)? {
                (Global::RebuildTensor, parts) => Some(self.view(parts)),
                _ => None,
            },
            _ => None,
        }
    }

    /// The integers of a tuple, or of a `torch.Size`.
    fn sizes(&self, value: Value) -> Option<Vec<usize>> {
        let value = match self.pickle.node(value)? {
            &Node::Call(Global::Size, arguments) => *self.pickle.list(arguments)?.first()?,
            _ => value,
        };
        let sizes = self.pickle.list(value)?;
        sizes.iter().map(|&value| size(value)).collect()
    }

    /// The tensor with the arguments of `_rebuild_tensor_v2` (storage, offset, size, stride, requires_grad, hooks), or of
    /// `_rebuild_tensor_v3`, whose seventh argument is the element type.
    fn view(&self, parts: &[Value]) -> Result<Array<'a>, BinaryError> {
        let [storage, offset, shape, strides, rest @ ..] = parts else {
            return Err(self.error("a tensor has no shape; the file is damaged"));
        };
        let (Some(offset), Some(shape), Some(strides)) =
            (size(*offset), self.sizes(*shape), self.sizes(*strides))
        else {
            return Err(self.error("the offset, shape or strides of a tensor are not integers of at least 0; the file is damaged"));
        };
        let (place, ty) = self.storage(*storage)?;
        let elements = |value: &Value| match self.pickle.node(*value) {
            Some(&Node::Global(Global::Elements(ty))) => Some(ty),
            _ => None,
        };
        let Some(ty) = rest.get(2).and_then(elements).or(ty) else {
            return Err(self.error(
                "the element type of a tensor is not supported; save integers, 32-bit or 64-bit floats",
            ));
        };
        let start = offset
            .checked_mul(ty.size())
            .and_then(|skip| skip.checked_add(place.start))
            .filter(|&start| start <= place.end);
        let bytes = start.and_then(|start| self.bytes.get(start..place.end));
        let Some(bytes) = bytes else {
            return Err(
                self.error("a tensor starts after the end of its storage; the file is damaged")
            );
        };
        let array = Array::new(bytes, ty, self.big_endian, shape, strides).map_err(|error| {
            let hint =
                "the file is damaged, or contains an expanded tensor (save `tensor.contiguous()`)";
            BinaryError::at(place.start, format!("{error}; {hint}"))
        })?;
        self.count_elements(array.shape())?;
        Ok(array)
    }

    /// Rejects tensors that view the same storages too often, so that the time to read all tensors is bounded by the file size.
    fn count_elements(&self, shape: &[usize]) -> Result<(), BinaryError> {
        let n = shape.iter().fold(1, |n: usize, &ne| n.saturating_mul(ne));
        self.n_viewed.set(self.n_viewed.get().saturating_add(n));
        if self.n_viewed.get() > self.bytes.len().saturating_mul(MAX_VIEWS) {
            return Err(
                self.error("too many tensors share the same storages; save clones of the tensors")
            );
        }
        Ok(())
    }

    /// The byte range of a storage and, if recorded, its element type: `('storage', torch.IntStorage, '0', 'cpu', 24)`.
    fn storage(&self, value: Value) -> Result<(Range<usize>, Option<ElementType>), BinaryError> {
        let id = match self.pickle.node(value) {
            Some(&Node::Persistent(id)) => self.pickle.list(id),
            _ => None,
        };
        let Some(&[_, elements, key, _location, _n_elements]) = id else {
            return Err(self.error("a tensor has no storage; the file is damaged"));
        };
        let key = self.pickle.text(key).unwrap_or_default();
        let Some(place) = self.storages.get(key) else {
            let key: String = key.chars().take(40).collect();
            return Err(self.error(format!(
                "storage {key:?} is not in the archive; the file is damaged"
            )));
        };
        let ty = match self.pickle.node(elements) {
            Some(&Node::Global(Global::Elements(ty))) => Some(ty),
            _ => None,
        };
        Ok((place.clone(), ty))
    }
}

/// An integer of at least 0.
fn size(value: Value) -> Option<usize> {
    match value {
        Value::Int(n) => usize::try_from(n).ok(),
        _ => None,
    }
}

/// The byte ranges of the entries of an archive. Compressed entries are rejected: PyTorch does not write them.
fn entries(bytes: &[u8]) -> Result<HashMap<String, Range<usize>>, BinaryError> {
    let unreadable = |error: rawzip::Error| {
        let reason =
            format!("the ZIP archive cannot be read ({error}); the file is damaged or truncated");
        BinaryError::at(0, reason)
    };
    let archive = ZipArchive::from_slice(bytes).map_err(unreadable)?;
    let mut list = archive.entries();
    let mut entries = HashMap::new();
    while let Some(header) = list.next_entry().map_err(unreadable)? {
        let name = String::from_utf8_lossy(header.file_path().as_bytes()).into_owned();
        let is_stored = header.compression_method() == CompressionMethod::STORE;
        if !is_stored || header.flags().is_encrypted() {
            let name: String = name.chars().take(80).collect();
            return Err(BinaryError::at(
                0,
                format!(
                    "entry {name:?} is compressed or encrypted, which is not supported; load the file and save it again with torch.save"
                ),
            ));
        }
        let entry = archive.get_entry(header.wayfinder()).map_err(unreadable)?;
        let (start, end) = entry.compressed_data_range();
        if let (Ok(start), Ok(end)) = (usize::try_from(start), usize::try_from(end)) {
            entries.insert(name, start..end);
        }
    }
    Ok(entries)
}

#[cfg(test)]
mod tests;
