//! Errors about foreign traces.

use std::error::Error as StdError;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use moe_trace::{Error, LayerId, MAX_ID, ModelInfo, ModelMismatch};

use crate::importers::responses::ResponseError;
use crate::layers::LayerError;

/// A location in a file, for error messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Location {
    /// A line, counted from 1.
    Line(u64),
    /// A record.
    Record {
        /// Number of the record, counted from 0.
        record: u64,
        /// Byte offset of the record in the file.
        offset: u64,
    },
    /// A byte offset, counted from 0.
    Byte(u64),
    /// An element of a document or array: `layers[3].experts[0]`; `/` is the document, and an empty text is the array that the
    /// file contains.
    Element(String),
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Line(line) => write!(f, "line {line}"),
            Self::Record { record, offset } => write!(f, "record {record} at byte {offset}"),
            Self::Byte(offset) => write!(f, "byte {offset}"),
            Self::Element(path) if path == "/" => f.write_str("the document"),
            Self::Element(path) if path.is_empty() => f.write_str("the array"),
            Self::Element(path) => write!(f, "element {path}"),
        }
    }
}

/// A value that a trace does not record, but the GGUF file of its model does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Missing {
    /// The number of experts that a token selects.
    TopK,
    /// The number of layers of the model, or which of them have experts.
    Layers,
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::TopK => "the number of experts that a token selects",
            Self::Layers => "the number of layers with experts",
        })
    }
}

/// Why a foreign trace cannot be read. Each message is one line: what is wrong, where, and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ForeignError {
    /// A file operation failed.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// The operation, as a verb: `read`.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
    /// The file cannot be read, or exceeds a size limit.
    #[error(transparent)]
    Read(#[from] Error),
    /// The data at a location are invalid.
    #[error("{}: {at}: {source}", path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// Where in the file.
        at: Location,
        /// What is wrong and what to do; see [`ForeignError::cause`].
        source: Box<dyn StdError + Send + Sync>,
    },
    /// The file cannot be used, for a reason without a location.
    #[error("{}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong and what to do; see [`ForeignError::cause`].
        source: Box<dyn StdError + Send + Sync>,
    },
    /// A layer, expert or slot number is not below the limit.
    #[error("{}: {at}: {name} {id} is out of range (0..={}); the file is damaged{}", path.display(), limit.saturating_sub(1), or_other_model(*limit))]
    OutOfRange {
        /// The file.
        path: PathBuf,
        /// Where in the file.
        at: Location,
        /// What the number identifies: `layer`, `expert` or `slot`.
        name: &'static str,
        /// The number.
        id: u64,
        /// The number of layers or experts of the model, or [`MAX_ID`].
        limit: u32,
    },
    /// The format has a version that the importer does not read.
    #[error("{}: {at}: format version {found:?} is not supported (supported: {supported}); convert it with a newer version of this program", path.display())]
    Version {
        /// The file.
        path: PathBuf,
        /// Where in the file.
        at: Location,
        /// The version of the file.
        found: String,
        /// The versions that the importer reads.
        supported: &'static str,
    },
    /// [`ImportOptions::ops`](crate::ImportOptions::ops) is not the table of the llama.cpp version that recorded the trace.
    #[error(
        "{}: the records with expert ids have operation number {operation}, which is not MUL_MAT_ID in the table of operations; \
         use the table of the llama.cpp version that recorded the trace",
        path.display()
    )]
    Operations {
        /// The file.
        path: PathBuf,
        /// Operation number of the records with expert ids.
        operation: u8,
    },
    /// The trace contains neither routing nor counts.
    #[error("{}: the {format} trace contains no routing{}; use a trace of a mixture-of-experts model", path.display(), in_parentheses(notes))]
    NoRouting {
        /// The file or directory.
        path: PathBuf,
        /// Name of its format.
        format: &'static str,
        /// Notes of the importer, which may say what it skipped.
        notes: Vec<String>,
    },
    /// The trace contains only counts, but the caller needs routing in order.
    #[error("{}: {format} files contain only counts, but this operation needs routing per token; use a trace with routing", path.display())]
    NoOrder {
        /// The file or directory.
        path: PathBuf,
        /// Name of its format.
        format: &'static str,
    },
    /// The layers of the trace cannot be mapped to the blocks of the model.
    #[error("{}: {at}: {source}", path.display())]
    Layers {
        /// The file.
        path: PathBuf,
        /// The array or row.
        at: Location,
        /// Why they cannot be mapped.
        source: LayerError,
    },
    /// The routing in a response of a server is invalid.
    #[error("{}: {at}: {source}", path.display())]
    Response {
        /// The file.
        path: PathBuf,
        /// The key of the routing.
        at: Location,
        /// What is wrong.
        source: ResponseError,
    },
    /// The trace does not record a value that the importer needs.
    #[error("{}: {at}: {missing} is not recorded in the trace", path.display())]
    Missing {
        /// The file.
        path: PathBuf,
        /// The data that cannot be read without the value.
        at: Location,
        /// The missing value.
        missing: Missing,
    },
    /// The number of experts per token is not that of the model that was traced.
    #[error("{}: {at}: {reason}; specify the top-k of the model that was traced", path.display())]
    TopK {
        /// The file.
        path: PathBuf,
        /// Where in the file.
        at: Location,
        /// Why the number is wrong.
        reason: String,
    },
    /// The trace belongs to another model than the one that the user specified, or than the other inputs.
    #[error("{}: {mismatch}; use inputs of the same model", path.display())]
    OtherModel {
        /// The file or directory.
        path: PathBuf,
        /// What differs.
        mismatch: ModelMismatch,
    },
    /// A GGUF file cannot be read.
    #[error(transparent)]
    Gguf(#[from] moe_gguf::Error),
    /// The sink of the rows failed.
    #[error(transparent)]
    Sink(#[from] Box<dyn StdError + Send + Sync>),
}

fn in_parentheses(notes: &[String]) -> String {
    match notes {
        [] => String::new(),
        notes => format!(" ({})", notes.join("; ")),
    }
}

fn or_other_model(limit: u32) -> &'static str {
    if limit == MAX_ID {
        ""
    } else {
        ", or belongs to another model"
    }
}

impl ForeignError {
    /// An error at a location in a file; `source` also says what to do.
    pub fn invalid(
        path: &Path,
        at: Location,
        source: impl Into<Box<dyn StdError + Send + Sync>>,
    ) -> Self {
        Self::Invalid {
            path: path.to_owned(),
            at,
            source: source.into(),
        }
    }

    /// An error about a file, without a location; `source` also says what to do.
    pub fn file(path: &Path, source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        Self::File {
            path: path.to_owned(),
            source: source.into(),
        }
    }

    /// Converts the error of a file operation, for `map_err`. `action` is the operation as a verb: `read`.
    pub fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io {
            action,
            path: path.to_owned(),
            source,
        }
    }

    /// The source of [`ForeignError::Invalid`] or [`ForeignError::File`] if it is a `T`: [`LineError`](crate::LineError),
    /// [`JsonError`](crate::JsonError), [`CountError`](crate::CountError) or [`RoutingError`](crate::RoutingError).
    pub fn cause<T: StdError + 'static>(&self) -> Option<&T> {
        match self {
            Self::Invalid { source, .. } | Self::File { source, .. } => source.downcast_ref(),
            _ => None,
        }
    }

    /// The location of the error, if it has one.
    pub fn location(&self) -> Option<&Location> {
        match self {
            Self::Invalid { at, .. }
            | Self::OutOfRange { at, .. }
            | Self::Version { at, .. }
            | Self::Layers { at, .. }
            | Self::Response { at, .. }
            | Self::Missing { at, .. }
            | Self::TopK { at, .. } => Some(at),
            _ => None,
        }
    }
}

/// Checks that the `model_info` recorded in the trace at `path` does not contradict `model`.
///
/// # Errors
/// [`ForeignError::OtherModel`] if they do.
pub fn check_model(
    model: &ModelInfo,
    model_info: &ModelInfo,
    path: &Path,
) -> Result<(), ForeignError> {
    match model.mismatch(model_info) {
        Some(mismatch) => Err(ForeignError::OtherModel {
            path: path.to_owned(),
            mismatch,
        }),
        None => Ok(()),
    }
}

/// Checks that none of the `layers` with counts in the learn file at `path` is a dense block of `model`.
///
/// Blocks that the model does not have are accepted: no cache contains them.
///
/// # Errors
/// [`ForeignError::Layers`] for the first dense block.
pub fn check_layers(
    model: &ModelInfo,
    layers: impl IntoIterator<Item = LayerId>,
    path: &Path,
) -> Result<(), ForeignError> {
    let n_layer = model.n_layer.unwrap_or(0);
    let is_dense = |layer: &LayerId| {
        !model.moe_layers.is_empty()
            && u32::from(layer.0) < n_layer
            && !model.moe_layers.contains(layer)
    };
    match layers.into_iter().find(is_dense) {
        Some(layer) => Err(ForeignError::Layers {
            path: path.to_owned(),
            at: Location::Element(format!("layer {layer}")),
            source: LayerError::Dense {
                layer: layer.index(),
            },
        }),
        None => Ok(()),
    }
}
