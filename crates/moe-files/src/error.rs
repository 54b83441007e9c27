//! Errors of this crate.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::signals::truncated_message;

/// Why a file was not written.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file operation failed.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// The operation, a verb.
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// Why it failed.
        source: Arc<io::Error>,
    },
    /// The output exists and may not be replaced.
    #[error("{} exists", path.display())]
    Exists {
        /// The output.
        path: PathBuf,
    },
    /// The output is one of the inputs, possibly through a link.
    #[error("{} is an input; choose another output", path.display())]
    IsInput {
        /// The output.
        path: PathBuf,
    },
    /// The path of the output file is a symbolic link. A rename would replace the link, not its target.
    #[error("{} is a symbolic link; pass the path of its target", path.display())]
    IsLink {
        /// The output.
        path: PathBuf,
    },
    /// The output lies inside an input directory that must not change.
    #[error("{} is inside the input {}; choose another output", path.display(), directory.display())]
    InsideInput {
        /// The output.
        path: PathBuf,
        /// The input directory.
        directory: PathBuf,
    },
    /// An input was truncated while it was mapped. Outputs computed from it are wrong.
    #[error("{}", truncated_message(path))]
    Truncated {
        /// The input.
        path: PathBuf,
    },
}

impl Error {
    /// Returns a function for `map_err` that adds the operation and the path to an I/O error.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io {
            action,
            path: path.to_owned(),
            source: Arc::new(source),
        }
    }
}
