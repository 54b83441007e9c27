//! What can go wrong with a GGUF file, and the one line that says so.

use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

use crate::content::Content;
use crate::types::{GgmlType, TypeError};
use crate::value::ValueType;

/// An error of this crate. Its text is one line: which file, what, where in it, and what to do.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused.
    #[error("{}: cannot {action}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What was being done to it.
        action: &'static str,
        /// The system's answer.
        source: io::Error,
    },
    /// The header breaks a rule of the format.
    #[error("{}: {fault} (at byte {offset}){}", path.display(), fault.mend())]
    Header {
        /// The file.
        path: PathBuf,
        /// Where in the file the fault lies.
        offset: u64,
        /// The rule that is broken.
        fault: Box<Fault>,
    },
    /// A key-value is there, but is of another type than the one asked for.
    #[error("{}: metadata key {key:?} is {found}, but {wanted} is needed; convert the model again, or set the key right", path.display())]
    WrongType {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// What the file holds.
        found: String,
        /// What was asked for.
        wanted: &'static str,
    },
    /// A model in several files is not whole, or not one model.
    #[error("{}: {fault}", path.display())]
    Shard {
        /// The shard that is at fault, or that is missing.
        path: PathBuf,
        /// What is wrong with it.
        fault: ShardFault,
    },
    /// The headers, each in order, do not make one model.
    #[error("{}: {fault}{}", path.display(), fault.mend())]
    Model {
        /// The file, or the first of them.
        path: PathBuf,
        /// The rule that is broken.
        fault: Box<Fault>,
    },
    /// The data of a tensor is not wholly inside its file.
    #[error("{}: tensor {tensor:?} lies at bytes {offset} to {end}, but the file ends at {file_size}: it is cut, fetch it again", path.display())]
    Cut {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// First byte of its data.
        offset: u64,
        /// One past its last byte.
        end: u64,
        /// Bytes that the file has.
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

    /// The broken rule, where the error is one of the header.
    pub fn fault(&self) -> Option<&Fault> {
        match self {
            Error::Header { fault, .. } | Error::Model { fault, .. } => Some(fault),
            _ => None,
        }
    }
}

/// What is wrong with a model in several files.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
#[allow(missing_docs)] // the fields are what the messages print
pub enum ShardFault {
    #[error(
        "this shard of the model ({number} of {count}) is missing: fetch it, beside the others"
    )]
    Missing { number: u64, count: u64 },
    #[error(
        "it is shard {number} of {count}, but is not named …-{number:05}-of-{count:05}.gguf, so the others cannot be found: give all shards such names again"
    )]
    Unnamed { number: u64, count: u64 },
    #[error(
        "its split.no says shard {found}, its name says {number}: it is a copy of another shard, or was renamed: fetch it again"
    )]
    Repeated { number: u64, found: u64 },
    #[error(
        "it is one of {count} shards, at most {limit} are allowed: if it is no faulty file, merge shards"
    )]
    TooMany { count: u64, limit: u64 },
    #[error("it is not of the same model as {}: {key} is {found} here and {expected} there: keep each model's shards apart", first.display())]
    Foreign {
        first: PathBuf,
        key: &'static str,
        found: String,
        expected: String,
    },
    #[error(
        "the shards have {found} tensors, but split.tensors.count promises {expected}: one of them is of another model: fetch the shards again"
    )]
    TensorCount { found: u64, expected: u64 },
}

/// A rule of the GGUF format that a header breaks.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
#[allow(missing_docs)] // the fields are what the messages print
pub enum Fault {
    #[error("not a GGUF file: it begins with {}, not with \"GGUF\"", found.escape_ascii())]
    BadMagic { found: Vec<u8> },
    #[error("it is {content}, not a GGUF model{}", after_semicolon(content.advice()))]
    OtherContent { content: Content },
    #[error(
        "a big-endian (byte-swapped) GGUF file, which is not supported: convert it to little-endian with llama.cpp's gguf_convert_endian.py"
    )]
    BigEndian,
    #[error("GGUF version 1 is no longer supported: convert the model again")]
    Version1,
    #[error("GGUF version {version} is not supported (2 and 3 are)")]
    BadVersion { version: u32 },
    #[error("the header is cut: {what} needs {needed} bytes, {left} are left")]
    Truncated {
        what: &'static str,
        needed: u64,
        left: u64,
    },
    #[error("the header goes on beyond {limit} bytes, more than any model's")]
    HeaderTooLong { limit: u64 },
    #[error("the header promises {count} {what}, more than the {left} bytes left can hold")]
    TooMany {
        what: &'static str,
        count: u64,
        left: u64,
    },
    #[error("the header has {count} tensors, at most {limit} are allowed")]
    TooManyTensors { count: u64, limit: u64 },
    #[error("the header has {count} key-values, at most {limit} are allowed")]
    TooManyKeyValues { count: u64, limit: u64 },
    #[error("metadata key {key:?} has {count} strings, at most {limit} are allowed")]
    TooManyStrings { key: String, count: u64, limit: u64 },
    #[error("{what} is not valid UTF-8")]
    NotUtf8 { what: &'static str },
    #[error("a metadata key is empty")]
    EmptyKey,
    #[error("metadata key {key:?} appears twice")]
    DuplicateKey { key: String },
    #[error("metadata key {key:?} has value type {id}, which does not exist (0 to 12 do)")]
    BadValueType { key: String, id: u32 },
    #[error("metadata key {key:?} is an array of arrays, which ggml refuses")]
    NestedArray { key: String },
    #[error("general.alignment is {found}, but must be a u32")]
    AlignmentType { found: ValueType },
    #[error("general.alignment is {value}, but must be a power of two")]
    BadAlignment { value: u32 },
    #[error("a tensor's name has {len} bytes, ggml allows at most 63")]
    TensorNameTooLong { len: u64 },
    #[error("tensor {tensor:?} appears twice")]
    DuplicateTensor { tensor: String },
    #[error("tensor {tensor:?} has {n_dims} dimensions, at most 4 are allowed")]
    BadDimensions { tensor: String, n_dims: u32 },
    #[error("tensor {tensor:?} has {ne} as its dimension {dim}, which is negative to ggml")]
    BadShape { tensor: String, dim: u32, ne: u64 },
    #[error("tensor {tensor:?} of shape {ne:?} has more elements than 63 bits count")]
    TooManyElements { tensor: String, ne: [u64; 4] },
    #[error("tensor {tensor:?}: {source}")]
    BadType { tensor: String, source: TypeError },
    #[error("tensor {tensor:?} has rows of {ne0} elements, which is not a whole number of {ty} blocks of {}", ty.block_size())]
    RowNotBlocks {
        tensor: String,
        ty: GgmlType,
        ne0: u64,
    },
    #[error("tensor {tensor:?} of shape {ne:?} and type {ty} has more bytes than 63 bits count")]
    TooManyBytes {
        tensor: String,
        ty: GgmlType,
        ne: [u64; 4],
    },
    #[error("tensor {tensor:?} would end beyond what 63 bits address (offset {offset})")]
    OffsetOverflow { tensor: String, offset: u64 },
    #[error("the tensors' sizes, padded, add up to more than 63 bits count")]
    TotalOverflow,
    #[error(
        "the 3-D expert tensors up to {tensor:?} claim {claimed} experts, at most {limit} are allowed in a model: if it is no faulty file, keep the experts of fewer layers in one"
    )]
    TooManyExperts {
        tensor: String,
        claimed: u64,
        limit: u64,
    },
}

impl Fault {
    /// What to do about a header that breaks the rule, behind a semicolon; nothing where the rule's own text tells it.
    fn mend(&self) -> &'static str {
        match self {
            Fault::BigEndian
            | Fault::OtherContent { .. }
            | Fault::Version1
            | Fault::BadType { .. }
            | Fault::TooManyExperts { .. } => "",
            Fault::BadMagic { .. } => "; give a model as a GGUF file",
            Fault::BadVersion { .. } => "; convert the model again, or use a newer moe-analyze",
            Fault::Truncated { .. }
            | Fault::HeaderTooLong { .. }
            | Fault::TooMany { .. }
            | Fault::TooManyTensors { .. }
            | Fault::TooManyKeyValues { .. }
            | Fault::TooManyStrings { .. }
            | Fault::NotUtf8 { .. } => "; the file is damaged, fetch it again",
            _ => "; fetch the file again, and if that is no better convert the model again",
        }
    }
}

fn after_semicolon(advice: &str) -> String {
    match advice {
        "" => String::new(),
        advice => format!("; {advice}"),
    }
}
