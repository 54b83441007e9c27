//! What `torch.save` writes: a zip archive of one pickle, `NAME/data.pkl`, and the bytes of each storage, `NAME/data/KEY`.
//!
//! The entries are stored as they are, so a tensor is a view of the file. A storage is read only when a tensor of it is asked
//! for, and nothing of the pickle is run ([`super::pickle`]).

use std::cell::Cell;
use std::collections::HashMap;
use std::ops::Range;

use rawzip::{CompressionMethod, ZipArchive};

use super::array::{Array, ElementType};
use super::fault::BinaryFault;
use super::pickle::{Global, Node, Pickle, Value};

/// How an archive begins.
const ZIP: &[u8] = b"PK\x03\x04";
/// How the files of PyTorch before 1.6 begin, which are no archives.
const OLD: &[u8] = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.";

/// How often all bytes of a file may be shown by its tensors.
const MAX_VIEWS: usize = 16;

/// Whether a file that begins with `sample` is one that PyTorch saved: its first entry is the pickle.
pub(crate) fn is_applicable(sample: &[u8]) -> bool {
    let name = sample
        .get(26..28)
        .map(|length| usize::from(u16::from_le_bytes([length[0], length[1]])))
        .and_then(|length| sample.get(30..)?.get(..length));
    sample.starts_with(OLD)
        || sample.starts_with(ZIP) && name.is_some_and(|name| name.ends_with(b"/data.pkl"))
}

/// A file that PyTorch saved.
#[derive(Debug)]
pub(crate) struct TorchFile<'a> {
    bytes: &'a [u8],
    /// Where the storages lie, by key.
    storages: HashMap<String, Range<usize>>,
    big_endian: bool,
    pickle: Pickle<'a>,
    pickle_start: usize,
    /// Elements of the tensors that were asked for.
    viewed: Cell<usize>,
}

impl<'a> TorchFile<'a> {
    /// Reads the archive's directory and its pickle.
    pub(crate) fn open(bytes: &'a [u8]) -> Result<Self, BinaryFault> {
        if bytes.starts_with(OLD) {
            return Err(BinaryFault::at(
                0,
                "written by PyTorch before 1.6, or with its old format, which is not read; load it and torch.save it anew",
            ));
        }
        let entries = entries(bytes)?;
        let pickled = |name: &str| name.strip_suffix("/data.pkl").map(str::to_owned);
        let Some(folder) = entries.keys().find_map(|name| pickled(name)) else {
            return Err(BinaryFault::at(
                0,
                "the archive has no data.pkl, so PyTorch did not save it; give a file that torch.save wrote",
            ));
        };
        let part = |name: &str| entries.get(&format!("{folder}/{name}")).cloned();
        let place = part("data.pkl").unwrap_or_default();
        let byteorder = part("byteorder").and_then(|place| bytes.get(place));
        let data = format!("{folder}/data/");
        let pickle_start = place.start;
        let pickle =
            Pickle::read(bytes.get(place).unwrap_or_default()).map_err(|fault| BinaryFault {
                offset: fault.offset + pickle_start as u64,
                ..fault
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
            viewed: Cell::new(0),
        })
    }

    /// What was saved.
    pub(crate) fn pickle(&self) -> &Pickle<'a> {
        &self.pickle
    }

    /// A fault of what was saved as a whole.
    pub(crate) fn fault(&self, reason: impl Into<String>) -> BinaryFault {
        BinaryFault::at(self.pickle_start, reason)
    }

    /// The tensor that a value is; `None` if it is none.
    pub(crate) fn tensor(&self, value: Value) -> Option<Result<Array<'a>, BinaryFault>> {
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

    /// The sizes of a tensor, or of a `torch.Size`.
    fn sizes(&self, value: Value) -> Option<Vec<usize>> {
        let value = match self.pickle.node(value)? {
            &Node::Call(Global::Size, arguments) => *self.pickle.list(arguments)?.first()?,
            _ => value,
        };
        let sizes = self.pickle.list(value)?;
        sizes.iter().map(|&size| whole(size)).collect()
    }

    /// A tensor from the arguments of `_rebuild_tensor_v2` (storage, offset, size, stride, requires_grad, hooks), or of `_v3`,
    /// which has the type of the elements in seventh place.
    fn view(&self, parts: &[Value]) -> Result<Array<'a>, BinaryFault> {
        let [storage, offset, size, stride, rest @ ..] = parts else {
            return Err(self.fault("a tensor lacks its shape; the file is damaged"));
        };
        let (Some(offset), Some(shape), Some(strides)) =
            (whole(*offset), self.sizes(*size), self.sizes(*stride))
        else {
            return Err(self.fault("a tensor has a shape that makes no sense; the file is damaged"));
        };
        let (place, ty) = self.storage(*storage)?;
        let elements = |value: &Value| match self.pickle.node(*value) {
            Some(&Node::Global(Global::Elements(ty))) => Some(ty),
            _ => None,
        };
        let Some(ty) = rest.get(2).and_then(elements).or(ty) else {
            return Err(self.fault(
                "a tensor holds elements of a type that is not read; save integers or 32-bit floats",
            ));
        };
        let start = offset
            .checked_mul(ty.size())
            .and_then(|skip| skip.checked_add(place.start))
            .filter(|&start| start <= place.end);
        let bytes = start.and_then(|start| self.bytes.get(start..place.end));
        let Some(bytes) = bytes else {
            return Err(self.fault("a tensor begins behind its storage; the file is damaged"));
        };
        let array = Array::new(bytes, ty, self.big_endian, shape, strides).map_err(|reason| {
            let hint = "the file is damaged, or holds an expanded tensor, which `.contiguous()` makes whole";
            BinaryFault::at(place.start, format!("{reason}; {hint}"))
        })?;
        self.account(array.shape())?;
        Ok(array)
    }

    /// Refuses tensors that show the same storages over and over, so that reading them all is bounded by the file.
    fn account(&self, shape: &[usize]) -> Result<(), BinaryFault> {
        let viewed = shape.iter().fold(1, |n: usize, &ne| n.saturating_mul(ne));
        self.viewed.set(self.viewed.get().saturating_add(viewed));
        if self.viewed.get() > self.bytes.len().saturating_mul(MAX_VIEWS) {
            return Err(self.fault("too many tensors share their storages; save clones of them"));
        }
        Ok(())
    }

    /// Where a storage lies and, if it says so, what its elements are: `('storage', torch.IntStorage, '0', 'cpu', 24)`.
    fn storage(&self, value: Value) -> Result<(Range<usize>, Option<ElementType>), BinaryFault> {
        let id = match self.pickle.node(value) {
            Some(&Node::Persistent(id)) => self.pickle.list(id),
            _ => None,
        };
        let Some(&[_, elements, key, _location, _n_elements]) = id else {
            return Err(self.fault("a tensor without a storage; the file is damaged"));
        };
        let key = self.pickle.text(key).unwrap_or_default();
        let Some(place) = self.storages.get(key) else {
            let key: String = key.chars().take(40).collect();
            return Err(self.fault(format!(
                "the storage {key:?} is not in the archive; the file is damaged"
            )));
        };
        let ty = match self.pickle.node(elements) {
            Some(&Node::Global(Global::Elements(ty))) => Some(ty),
            _ => None,
        };
        Ok((place.clone(), ty))
    }
}

/// A whole number that counts something.
fn whole(value: Value) -> Option<usize> {
    match value {
        Value::Int(n) => usize::try_from(n).ok(),
        _ => None,
    }
}

/// Where the entries of an archive lie. PyTorch compresses none, so what is compressed is not its own.
fn entries(bytes: &[u8]) -> Result<HashMap<String, Range<usize>>, BinaryFault> {
    let unreadable = |error: rawzip::Error| {
        let reason =
            format!("the zip archive cannot be read ({error}); the file is damaged or cut off");
        BinaryFault::at(0, reason)
    };
    let archive = ZipArchive::from_slice(bytes).map_err(unreadable)?;
    let mut list = archive.entries();
    let mut entries = HashMap::new();
    while let Some(header) = list.next_entry().map_err(unreadable)? {
        let name = String::from_utf8_lossy(header.file_path().as_bytes()).into_owned();
        let is_stored = header.compression_method() == CompressionMethod::STORE;
        if !is_stored || header.flags().is_encrypted() {
            let name: String = name.chars().take(80).collect();
            return Err(BinaryFault::at(
                0,
                format!(
                    "{name:?} is compressed or encrypted, as PyTorch does not do; load it and torch.save it anew"
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
