//! Input files that are mapped, output files that appear complete or not at all, and the signals
//! that interrupt both.
//!
//! - [`MappedFile`] maps an input. The process knows which addresses belong to which file, so that
//!   [`signals::install`] can name a file that another program truncates.
//! - [`csv`] reads and writes comma-separated values.
//! - [`AtomicFile`] and [`AtomicFiles`] write an output under a temporary name and rename it. A
//!   file that appeared meanwhile is replaced only on request. [`Transaction`] combines renames and
//!   removals.
//! - [`TemporaryDirectory`] holds files that only this process reads.
//! - [`inputs`] holds the paths that no output of this process may replace.
//! - [`signals`] removes temporary files when the process is ended by a signal.

#![warn(missing_docs)]

mod atomic;
pub mod csv;
mod error;
mod group;
pub mod inputs;
mod mapped;
pub mod signals;
mod stale;
mod temporary;
mod temporary_directory;
pub mod text;
mod transaction;

pub use atomic::{AtomicFile, commit_all, commit_and_remove};
pub use error::Error;
pub use group::AtomicFiles;
pub use mapped::{MappedFile, truncated_file};
pub use stale::is_temporary_name;
pub use temporary::NewDirectories;
pub use temporary_directory::TemporaryDirectory;
pub use transaction::{KEPT_FILES, Transaction};

use std::path::Path;

/// The directory that `path` lies in; `.` for a bare file name.
pub fn parent_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// Refuses to complete an output after an input was truncated while it was mapped.
///
/// Only in a program with [`signals::install`]: to a program that goes on after such an error, a file that was truncated
/// earlier says nothing about later outputs.
///
/// # Errors
/// [`Error::Truncated`].
pub fn check_inputs() -> Result<(), Error> {
    match truncated_file().filter(|_| signals::are_installed()) {
        Some(path) => Err(Error::Truncated { path }),
        None => Ok(()),
    }
}
