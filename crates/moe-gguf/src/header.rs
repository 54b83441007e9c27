//! Parser of the header of one file. It enforces the rules of ggml's reader (`gguf.cpp`).

use std::path::Path;

use crate::bytes::Bytes;
use crate::content::Content;
use crate::cursor::{Cursor, Located};
use crate::error::{Error, Fault};
use crate::format::{DEFAULT_ALIGNMENT, MAX_DIMS, MAX_I64, MAX_NAME, tensor_size};
use crate::gguf::Tensor;
use crate::metadata::{Entry, Metadata};
use crate::types::GgmlType;
use crate::value::{Value, ValueType};

/// Minimum size of a key-value in bytes: key length, one byte of key, value type, one byte of value.
const MIN_KEY_VALUE: u64 = 8 + 1 + 4 + 1;
/// Minimum size of a tensor in the table, in bytes: name length, number of dimensions, type, offset.
const MIN_TENSOR: u64 = 8 + 4 + 4 + 8;
/// Maximum number of tensors: five times that of the largest current model with one tensor per expert. Without the limit, a
/// small header could need much memory: a tensor takes up to eight times its bytes in the header.
const MAX_TENSORS: u64 = 1 << 18;
/// Maximum number of key-values: a thousand times that of current models. The reason is the same as for `MAX_TENSORS`.
const MAX_KEY_VALUES: u64 = 1 << 16;
/// Maximum number of elements to allocate memory for in advance, because a count may be wrong.
const FIRST_CAPACITY: u64 = 4096;
/// Number of bytes by which the format of a file other than GGUF is recognized.
const SAMPLE_SIZE: usize = 64 * 1024;

/// The header of one file.
#[derive(Debug)]
pub(crate) struct Header {
    pub(crate) version: u32,
    pub(crate) metadata: Metadata,
    /// Offsets are from the start of the file; `index` and `file` are those of a model in one file.
    pub(crate) tensors: Vec<Tensor>,
    pub(crate) alignment: u64,
    /// Offset of the byte after the tensor table.
    pub(crate) size: u64,
    /// Offset of the data section.
    pub(crate) data_offset: u64,
}

impl Header {
    pub(crate) fn parse(path: &Path, bytes: &Bytes) -> Result<Header, Error> {
        parse(path, bytes).map_err(|(offset, fault)| Error::Header {
            path: path.to_owned(),
            offset,
            fault: Box::new(fault),
        })
    }
}

fn parse(path: &Path, bytes: &Bytes) -> Located<Header> {
    let mut cursor = Cursor::new(bytes.as_slice());
    let version = read_version(bytes.as_slice(), &mut cursor)?;
    let at = cursor.pos();
    let n_tensors = cursor.count(MIN_TENSOR, "tensors")?;
    if n_tensors > MAX_TENSORS {
        let (count, limit) = (n_tensors, MAX_TENSORS);
        return Err((at, Fault::TooManyTensors { count, limit }));
    }
    let at = cursor.pos();
    let n_kv = cursor.count(MIN_KEY_VALUE, "key-values")?;
    if n_kv > MAX_KEY_VALUES {
        let (count, limit) = (n_kv, MAX_KEY_VALUES);
        return Err((at, Fault::TooManyKeyValues { count, limit }));
    }

    let metadata = read_metadata(path, bytes, &mut cursor, n_kv)?;
    let alignment = read_alignment(&metadata).map_err(|fault| (cursor.pos(), fault))?;
    let mut tensors = read_tensors(&mut cursor, n_tensors)?;

    let size = cursor.pos();
    let data_offset = size.next_multiple_of(alignment);
    place_tensors(&mut tensors, data_offset, alignment).map_err(|fault| (size, fault))?;
    Ok(Header {
        version,
        metadata,
        tensors,
        alignment,
        size,
        data_offset,
    })
}

fn read_version(bytes: &[u8], cursor: &mut Cursor<'_>) -> Located<u32> {
    match cursor.take(4, "the magic")? {
        b"GGUF" => {}
        b"FUGG" => return Err((0, Fault::BigEndian)),
        magic => {
            let fault = match Content::of(&bytes[..bytes.len().min(SAMPLE_SIZE)]) {
                Some(content) => Fault::OtherContent { content },
                None => Fault::BadMagic {
                    found: magic.to_owned(),
                },
            };
            return Err((0, fault));
        }
    }
    let at = cursor.pos();
    let fault = match cursor.u32("the version")? {
        version @ (2 | 3) => return Ok(version),
        1 => Fault::Version1,
        // In a byte-swapped small number, the low 16 bits are zero.
        version if version != 0 && version & 0xFFFF == 0 => Fault::BigEndian,
        version => Fault::BadVersion { version },
    };
    Err((at, fault))
}

fn read_metadata(
    path: &Path,
    bytes: &Bytes,
    cursor: &mut Cursor<'_>,
    n_kv: u64,
) -> Located<Metadata> {
    let mut entries = Vec::with_capacity(n_kv.min(FIRST_CAPACITY) as usize);
    for _ in 0..n_kv {
        entries.push(read_entry(bytes, cursor)?);
    }
    Metadata::new(path, bytes, entries, cursor.pos())
}

fn read_entry(bytes: &Bytes, cursor: &mut Cursor<'_>) -> Located<Entry> {
    let offset = cursor.pos();
    let key = cursor.string("a metadata key")?;
    let key = utf8(key, "a metadata key").map_err(|fault| (offset, fault))?;
    if key.is_empty() {
        return Err((offset, Fault::EmptyKey));
    }
    let type_offset = cursor.pos();
    let id = cursor.u32("a value type")?;
    let Some(ty) = ValueType::from_id(id) else {
        let key = key.to_owned();
        return Err((type_offset, Fault::BadValueType { key, id }));
    };
    let value = Value::read(cursor, bytes, ty, key)?;
    Ok(Entry {
        key: key.into(),
        value,
        type_offset: u32::try_from(type_offset).expect("MAX_HEADER fits in 32 bits"),
    })
}

fn read_alignment(metadata: &Metadata) -> Result<u64, Fault> {
    match metadata.get("general.alignment") {
        None => Ok(DEFAULT_ALIGNMENT.into()),
        Some(&Value::U32(value)) if value.is_power_of_two() => Ok(value.into()),
        Some(&Value::U32(value)) => Err(Fault::BadAlignment { value }),
        Some(other) => Err(Fault::AlignmentType {
            found: other.value_type(),
        }),
    }
}

fn read_tensors(cursor: &mut Cursor<'_>, n_tensors: u64) -> Located<Vec<Tensor>> {
    cursor
        .fits(n_tensors, MIN_TENSOR, "tensors")
        .map_err(|fault| (cursor.pos(), fault))?;
    let mut tensors = Vec::with_capacity(n_tensors.min(FIRST_CAPACITY) as usize);
    for (index, _) in (0..).zip(0..n_tensors) {
        tensors.push(read_tensor(cursor, index)?);
    }
    Ok(tensors)
}

/// Reads an entry of the tensor table. Its offset is relative to the data section, as in the file.
fn read_tensor(cursor: &mut Cursor<'_>, index: u32) -> Located<Tensor> {
    let at = cursor.pos();
    let here = |fault| (at, fault);

    let name = cursor.string("a tensor name")?;
    if name.len() as u64 > MAX_NAME {
        return Err(here(Fault::TensorNameTooLong {
            len: name.len() as u64,
        }));
    }
    let name = utf8(name, "a tensor name").map_err(here)?.to_owned();

    let n_dims = cursor.u32("a tensor's dimensions")?;
    if n_dims > MAX_DIMS {
        return Err(here(Fault::BadDimensions {
            tensor: name,
            n_dims,
        }));
    }
    let mut ne = [1; MAX_DIMS as usize];
    for dim in 0..n_dims {
        let size = cursor.u64("a tensor's dimensions")?;
        if size > MAX_I64 {
            return Err(here(Fault::BadShape {
                tensor: name,
                dim,
                ne: size,
            }));
        }
        ne[dim as usize] = size;
    }

    let type_id = cursor.u32("a tensor's type")?;
    let offset = cursor.u64("a tensor's offset")?;
    let ty = match GgmlType::from_id(type_id) {
        Ok(ty) => ty,
        Err(source) => {
            return Err(here(Fault::BadType {
                tensor: name,
                source,
            }));
        }
    };
    let size_bytes = tensor_size(&name, ty, ne).map_err(here)?;
    Ok(Tensor {
        name,
        index,
        file: 0,
        ty,
        n_dims,
        ne,
        offset,
        size_bytes,
    })
}

/// Converts the offsets to offsets in the file. Rejects offsets and padded sizes that overflow 63 bits.
fn place_tensors(tensors: &mut [Tensor], data_offset: u64, alignment: u64) -> Result<(), Fault> {
    let mut total: u64 = data_offset;
    for tensor in tensors {
        let padded = tensor.size_bytes.checked_next_multiple_of(alignment);
        total = padded
            .and_then(|size| total.checked_add(size))
            .filter(|&total| total <= MAX_I64)
            .ok_or(Fault::TotalOverflow)?;

        let relative = tensor.offset;
        let absolute = relative.checked_add(data_offset);
        let end = absolute.and_then(|offset| offset.checked_add(tensor.size_bytes));
        match (absolute, end) {
            (Some(absolute), Some(end)) if end <= MAX_I64 - alignment => tensor.offset = absolute,
            _ => {
                return Err(Fault::OffsetOverflow {
                    tensor: tensor.name.clone(),
                    offset: relative,
                });
            }
        }
    }
    Ok(())
}

fn utf8<'a>(bytes: &'a [u8], what: &'static str) -> Result<&'a str, Fault> {
    std::str::from_utf8(bytes).map_err(|_| Fault::NotUtf8 { what })
}
