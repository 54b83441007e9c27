//! What can go wrong with a foreign trace.

use std::error::Error as StdError;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use moe_trace::{Contradiction, Error, Facts, MAX_ID};

use crate::importers::responses::ResponseError;
use crate::layers::LayerError;

/// A place in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum At {
    /// A line, counted from 1.
    Line(u64),
    /// A record, counted from 0, and the byte where it begins.
    Record {
        /// Its number.
        record: u64,
        /// Its first byte.
        offset: u64,
    },
    /// A byte, counted from 0.
    Byte(u64),
    /// An element of a document, as `layers[3].experts[0]`.
    Element(String),
}

impl fmt::Display for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Line(line) => write!(f, "line {line}"),
            Self::Record { record, offset } => write!(f, "record {record} at byte {offset}"),
            Self::Byte(offset) => write!(f, "byte {offset}"),
            Self::Element(path) => write!(f, "element {path}"),
        }
    }
}

/// What a trace does not record and its model's file contains.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Missing {
    /// The number of experts that a token selects.
    TopK,
    /// The number of layers, or which of them have experts.
    Layers,
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::TopK => "the number of experts that a token selects",
            Self::Layers => "which blocks of the model the layers are",
        })
    }
}

/// Why a foreign trace could not be read; each says on one line what is wrong, where, and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ForeignError {
    /// A file operation failed.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// On which file.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
    /// The file cannot be read, or is larger than any of its kind.
    #[error(transparent)]
    Read(#[from] Error),
    /// A place in the file makes no sense.
    #[error("{}: {at}: {source}", path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// Where.
        at: At,
        /// What is wrong, and what to do: an error of the format.
        source: Box<dyn StdError + Send + Sync>,
    },
    /// The file as a whole cannot be used.
    #[error("{}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong, and what to do: an error of the format.
        source: Box<dyn StdError + Send + Sync>,
    },
    /// The table of operations is not that of the trace.
    #[error(
        "{}: the records with experts are of operation {operation}, which is not MUL_MAT_ID in the table of operations; give \
         the table of operations of the llama.cpp that recorded",
        path.display()
    )]
    Operations {
        /// The file.
        path: PathBuf,
        /// Number of the operation that selects experts.
        operation: u8,
    },
    /// The trace holds nothing.
    #[error("{} holds no routing ({format}{}); give a trace of a mixture-of-experts model", path.display(), after_colon(notes))]
    Nothing {
        /// The file or directory.
        path: PathBuf,
        /// Name of its format.
        format: &'static str,
        /// What the importer said: perhaps that all there was is left out.
        notes: Vec<String>,
    },
    /// The trace has counts alone.
    #[error("{} has counts alone ({format}), and this needs tokens in their order; count it with `hotness`, or give a trace of tokens", path.display())]
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
        at: At,
        /// Why they cannot.
        source: LayerError,
    },
    /// The routing of a server's response makes no sense.
    #[error("{}: {at}: {source}", path.display())]
    Response {
        /// The file.
        path: PathBuf,
        /// The key of the routing.
        at: At,
        /// What is wrong.
        source: ResponseError,
    },
    /// The trace does not record something without which it cannot be read.
    #[error("{}: {at}: {missing} is not recorded", path.display())]
    Missing {
        /// The file.
        path: PathBuf,
        /// Where it would be, or what needs it.
        at: At,
        /// What is missing.
        missing: Missing,
    },
    /// The trace is of another model than the one that was named, or that what it goes with is of.
    #[error("{}: {contradiction}; give what is of one model", path.display())]
    OtherModel {
        /// The file or directory.
        path: PathBuf,
        /// What differs.
        contradiction: Contradiction,
    },
    /// A GGUF file cannot be read.
    #[error(transparent)]
    Gguf(#[from] moe_gguf::Error),
    /// Where the rows go, something failed.
    #[error(transparent)]
    Sink(#[from] Box<dyn StdError + Send + Sync>),
}

fn after_colon(notes: &[String]) -> String {
    match notes {
        [] => String::new(),
        notes => format!(": {}", notes.join("; ")),
    }
}

impl ForeignError {
    /// A place in a file that makes no sense; `source` says also what to do.
    pub fn invalid(
        path: &Path,
        at: At,
        source: impl Into<Box<dyn StdError + Send + Sync>>,
    ) -> Self {
        Self::Invalid {
            path: path.to_owned(),
            at,
            source: source.into(),
        }
    }

    /// A file that cannot be used as a whole; `source` says also what to do.
    pub fn file(path: &Path, source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        Self::File {
            path: path.to_owned(),
            source: source.into(),
        }
    }

    /// For `map_err` on a file operation.
    pub fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io {
            action,
            path: path.to_owned(),
            source,
        }
    }

    pub(crate) fn id(path: &Path, at: At, what: &str, id: u64, limit: u32) -> Self {
        let hint = if limit == MAX_ID {
            "the file is damaged"
        } else {
            "the file is damaged, or belongs to another model"
        };
        Self::invalid(
            path,
            at,
            format!("{what} {id} is out of range (below {limit}); {hint}"),
        )
    }
}

/// Makes sure that the trace at `path`, which says `facts`, can be of `model`.
///
/// # Errors
/// [`ForeignError::OtherModel`] if it cannot.
pub fn check_model(model: &Facts, facts: &Facts, path: &Path) -> Result<(), ForeignError> {
    match model.contradiction(facts) {
        Some(contradiction) => Err(ForeignError::OtherModel {
            path: path.to_owned(),
            contradiction,
        }),
        None => Ok(()),
    }
}
