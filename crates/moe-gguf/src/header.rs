//! Parses the header of one file, by the rules of ggml's own reader.

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

/// Key length, one byte of key, value type, one byte of value.
const MIN_KEY_VALUE: u64 = 8 + 1 + 4 + 1;
/// Name length, number of dimensions, type, offset.
const MIN_TENSOR: u64 = 8 + 4 + 4 + 8;
/// Five times what the largest model of today has with one tensor an expert. What a tensor takes in
/// memory is more than eight times the least that it takes in a header.
const MAX_TENSORS: u64 = 1 << 18;
/// A thousand times what a model has. In memory a key-value takes more than eight times the least that it takes in a
/// header.
const MAX_KEY_VALUES: u64 = 1 << 16;
/// A count is believed as the elements come, not in advance.
const FIRST_CAPACITY: u64 = 4096;
/// Bytes by which a file that is not GGUF is recognized.
const SAMPLE_SIZE: usize = 64 * 1024;

/// What one file's header says.
#[derive(Debug)]
pub(crate) struct Header {
    pub(crate) version: u32,
    pub(crate) metadata: Metadata,
    /// Their `offset` is absolute; `index` and `file` are those of a model in one file.
    pub(crate) tensors: Vec<Tensor>,
    pub(crate) alignment: u64,
    /// One past the last byte of the tensor table.
    pub(crate) size: u64,
    /// First byte of the data section.
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
        // A byte-swapped small number has its low half empty.
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

/// Reads an entry of the tensor table; its offset is still relative to the data section.
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

/// Turns the offsets into absolute ones, and refuses sizes that do not add up in 63 bits.
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
