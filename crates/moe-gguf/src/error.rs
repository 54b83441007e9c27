//! Errors of GGUF files.

use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

use crate::content::Content;
use crate::types::{GgmlType, TypeError};
use crate::value::ValueType;

/// An error of this crate. Its message is one line: the file, what is wrong, where, and, if it is not obvious, what to do.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// A file operation failed.
    #[error("{}: cannot {action}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The operation, as an infinitive: `open`.
        action: &'static str,
        /// The error of the system.
        source: io::Error,
    },
    /// A header violates a rule of the format.
    #[error("{}: {fault} (at byte {offset}){}", path.display(), fault.advice())]
    Header {
        /// The file.
        path: PathBuf,
        /// Offset of the fault from the start of the file, in bytes.
        offset: u64,
        /// The violated rule.
        fault: Box<Fault>,
    },
    /// The value of a key has a different type than the caller requires.
    #[error("{}: metadata key {key:?} is {found}, but must be {wanted}; convert the model again, or correct the key", path.display())]
    WrongType {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// Description of the value in the file.
        found: String,
        /// Description of the required type.
        wanted: &'static str,
    },
    /// The shards of a model are incomplete or do not belong together.
    #[error("{}: {fault}", path.display())]
    Shard {
        /// The shard with the fault, or the missing shard.
        path: PathBuf,
        /// What is wrong with it.
        fault: ShardFault,
    },
    /// The headers are valid on their own, but not together.
    #[error("{}: {fault}{}", path.display(), fault.advice())]
    Model {
        /// The first file of the model.
        path: PathBuf,
        /// The violated rule.
        fault: Box<Fault>,
    },
    /// The data of a tensor is not completely inside its file.
    #[error("{}: the file is truncated: tensor {tensor:?} starts at byte {offset} and ends at byte {end}, but the file has {file_size} bytes; download it again", path.display())]
    Truncated {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Offset of its first byte from the start of the file.
        offset: u64,
        /// Offset of the byte after its last byte.
        end: u64,
        /// Size of the file in bytes.
        file_size: u64,
    },
}

impl Error {
    pub(crate) fn io(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> Error {
        let path = path.to_owned();
        move |source| Error::Io {
            path,
            action,
            source,
        }
    }

    /// Returns the violated rule of [`Error::Header`] or [`Error::Model`]; `None` for other errors.
    pub fn fault(&self) -> Option<&Fault> {
        match self {
            Error::Header { fault, .. } | Error::Model { fault, .. } => Some(fault),
            _ => None,
        }
    }
}

/// What is wrong with a model in several files (shards). Shard numbers start at 1, as in file names.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
#[allow(missing_docs)] // The variants describe their fields.
pub enum ShardFault {
    /// The file of shard `number` of `count` does not exist.
    #[error(
        "shard {number} of {count} is missing; download it to the directory of the other shards"
    )]
    Missing { number: u64, count: u64 },
    /// According to its keys the file is shard `number` of `count`, but it does not have the file name of a shard.
    #[error(
        "the file is shard {number} of {count}, but its name does not end with -{number:05}-of-{count:05}.gguf, so the other shards cannot be found; restore the names of all shards"
    )]
    Unnamed { number: u64, count: u64 },
    /// The file name has shard number `number`, but the file contains shard `found`.
    #[error(
        "the file is shard {found} according to split.no, but shard {number} according to its name; it was copied or renamed: download it again"
    )]
    Repeated { number: u64, found: u64 },
    /// The model has `count` shards, more than `limit`.
    #[error(
        "the model has {count} shards, but at most {limit} are supported; download the file again, or merge shards"
    )]
    TooMany { count: u64, limit: u64 },
    /// The file belongs to another model than the shard `first`: the value of `key` differs.
    #[error("the file is a shard of a different model than {}: {key} is {found}, not {expected}; use a separate directory for each model", first.display())]
    Foreign {
        first: PathBuf,
        key: &'static str,
        found: String,
        expected: String,
    },
    /// The shards have `found` tensors together, but `split.tensors.count` is `expected`.
    #[error(
        "the shards have {found} tensors, but split.tensors.count is {expected}; a shard belongs to another model: download the shards again"
    )]
    TensorCount { found: u64, expected: u64 },
}

/// A rule of the GGUF format that a header violates.
///
/// In all variants, `tensor` is the name of the tensor, `key` the metadata key, `ne` the shape with the innermost dimension
/// first, and `limit` the highest supported value.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
#[allow(missing_docs)] // The variants describe their fields.
pub enum Fault {
    /// The file does not start with `GGUF`. `found` is its first bytes.
    #[error("not a GGUF file: it starts with \"{}\" instead of \"GGUF\"", found.escape_ascii())]
    BadMagic { found: Vec<u8> },
    /// The file has another known format.
    #[error("the file is {content}, not a GGUF model{}", after_semicolon(content.advice()))]
    OtherContent { content: Content },
    /// The file is big-endian.
    #[error(
        "big-endian GGUF files are not supported; convert the file to little-endian with llama.cpp's gguf_convert_endian.py"
    )]
    BigEndian,
    /// The file has GGUF version 1, which llama.cpp no longer reads.
    #[error("GGUF version 1 is not supported; convert the model again")]
    Version1,
    /// The GGUF version is neither 2 nor 3.
    #[error("GGUF version {version} is not supported; supported are 2 and 3")]
    BadVersion { version: u32 },
    /// The file ends within the header. `what` is the value to read, `needed` its size in bytes, `left` the remaining bytes.
    #[error(
        "the header is truncated: reading {what} needs {needed} bytes, but only {left} are left"
    )]
    Truncated {
        what: &'static str,
        needed: u64,
        left: u64,
    },
    /// The header is longer than `limit` bytes.
    #[error("the header is longer than {limit} bytes, which no model needs")]
    HeaderTooLong { limit: u64 },
    /// The header declares `count` items of the kind `what`, but has only `left` more bytes.
    #[error("the header declares {count} {what}, more than the remaining {left} bytes can contain")]
    TooMany {
        what: &'static str,
        count: u64,
        left: u64,
    },
    /// The header has more than `limit` tensors.
    #[error("the header has {count} tensors, but at most {limit} are supported")]
    TooManyTensors { count: u64, limit: u64 },
    /// The header has more than `limit` key-values.
    #[error("the header has {count} key-values, but at most {limit} are supported")]
    TooManyKeyValues { count: u64, limit: u64 },
    /// An array has `count` strings, more than `limit`.
    #[error("metadata key {key:?} has {count} strings, but at most {limit} are supported")]
    TooManyStrings { key: String, count: u64, limit: u64 },
    /// A key or a tensor name (`what`) is not valid UTF-8.
    #[error("{what} is not valid UTF-8")]
    NotUtf8 { what: &'static str },
    /// A metadata key has no characters.
    #[error("a metadata key is empty")]
    EmptyKey,
    /// A metadata key is in the header more than once.
    #[error("metadata key {key:?} appears twice")]
    DuplicateKey { key: String },
    /// A value has an unknown type `id`.
    #[error("metadata key {key:?} has value type {id}, which is out of range (0..=12)")]
    BadValueType { key: String, id: u32 },
    /// A value is an array of arrays.
    #[error("metadata key {key:?} is an array of arrays, which ggml rejects")]
    NestedArray { key: String },
    /// `general.alignment` has the type `found` instead of `u32`.
    #[error("general.alignment is {found}, but must be a u32")]
    AlignmentType { found: ValueType },
    /// `general.alignment` is 0 or not a power of two.
    #[error("general.alignment is {value}, but must be a power of two")]
    BadAlignment { value: u32 },
    /// A tensor name has `len` bytes, more than [`MAX_NAME`](crate::format::MAX_NAME).
    #[error("a tensor name has {len} bytes, but ggml allows at most 63")]
    TensorNameTooLong { len: u64 },
    /// A tensor name is in the tensor table more than once.
    #[error("tensor {tensor:?} appears twice")]
    DuplicateTensor { tensor: String },
    /// A tensor has more dimensions than [`MAX_DIMS`](crate::format::MAX_DIMS).
    #[error("tensor {tensor:?} has {n_dims} dimensions, but at most 4 are allowed")]
    BadDimensions { tensor: String, n_dims: u32 },
    /// The number of elements `ne` in dimension `dim` exceeds [`MAX_I64`](crate::format::MAX_I64).
    #[error("tensor {tensor:?} has ne[{dim}] = {ne}, which does not fit a signed 64-bit integer")]
    BadShape { tensor: String, dim: u32, ne: u64 },
    /// A tensor has 2^63 or more elements.
    #[error("tensor {tensor:?} of shape {ne:?} has 2^63 or more elements")]
    TooManyElements { tensor: String, ne: [u64; 4] },
    /// A tensor has a type of unknown size.
    #[error("tensor {tensor:?}: {source}")]
    BadType { tensor: String, source: TypeError },
    /// The number of elements of a row, `ne0`, is not a multiple of the block size of the type.
    #[error("tensor {tensor:?} has rows of {ne0} elements, which is not a multiple of the {ty} block size {}", ty.block_size())]
    RowNotBlocks {
        tensor: String,
        ty: GgmlType,
        ne0: u64,
    },
    /// A tensor has 2^63 or more bytes.
    #[error("tensor {tensor:?} of shape {ne:?} and type {ty} has 2^63 or more bytes")]
    TooManyBytes {
        tensor: String,
        ty: GgmlType,
        ne: [u64; 4],
    },
    /// The end of a tensor does not fit a signed 64-bit integer. `offset` is relative to the data section, in bytes.
    #[error("tensor {tensor:?} at offset {offset} would end at byte 2^63 or later")]
    OffsetOverflow { tensor: String, offset: u64 },
    /// The padded sizes of all tensors do not fit a signed 64-bit integer together.
    #[error("the sum of the padded tensor sizes is 2^63 bytes or more")]
    TotalOverflow,
    /// The stacked expert tensors up to `tensor` have `claimed` expert slices, more than
    /// [`MAX_EXPERT_ROWS`](crate::MAX_EXPERT_ROWS).
    #[error(
        "the stacked expert tensors up to {tensor:?} have {claimed} expert slices, but at most {limit} are supported in a model"
    )]
    TooManyExperts {
        tensor: String,
        claimed: u64,
        limit: u64,
    },
}

impl Fault {
    /// Returns what to do about the fault, after a semicolon. Empty if the message of the fault contains it.
    fn advice(&self) -> &'static str {
        match self {
            Fault::BigEndian
            | Fault::OtherContent { .. }
            | Fault::Version1
            | Fault::BadType { .. } => "",
            Fault::BadMagic { .. } => "; choose a model in the GGUF format",
            Fault::BadVersion { .. } => {
                "; convert the model again, or use a newer version of this software"
            }
            Fault::Truncated { .. }
            | Fault::HeaderTooLong { .. }
            | Fault::TooMany { .. }
            | Fault::TooManyTensors { .. }
            | Fault::TooManyKeyValues { .. }
            | Fault::TooManyStrings { .. }
            | Fault::TooManyExperts { .. }
            | Fault::NotUtf8 { .. } => "; the file is damaged, download it again",
            _ => "; download the file again; if that does not help, convert the model again",
        }
    }
}

fn after_semicolon(advice: &str) -> String {
    match advice {
        "" => String::new(),
        advice => format!("; {advice}"),
    }
}
