//! File handling of command-line programs: memory-mapped inputs, atomic outputs, and signals.
//!
//! - [`AtomicFile`] and [`AtomicFiles`] write outputs under temporary names and rename them, so that a file is complete or
//!   does not exist. A file that was created meanwhile is replaced only on request. [`Transaction`] combines renames and
//!   removals.
//! - [`MappedFile`] maps an input. The process records the addresses of each mapped file, so that [`signals::install`] can
//!   report which file another program truncated.
//! - [`csv`] reads and writes comma-separated values.
//! - [`TemporaryDirectory`] is for files that only this process reads.
//! - [`inputs`] contains the paths that no output of this process may replace.
//! - [`signals`] removes temporary files before a signal ends the process.
//! - [`stack`] calls functions that need a large stack.

#![warn(missing_docs)]

mod atomic;
pub mod csv;
mod directory_lock;
mod error;
mod group;
pub mod inputs;
mod mapped;
pub mod signals;
pub mod stack;
mod stale;
mod temporary;
mod temporary_directory;
pub mod text;
mod transaction;

pub use atomic::{AtomicFile, check_link, commit_all, commit_and_remove};
pub use error::Error;
pub use group::AtomicFiles;
pub use mapped::{MappedFile, truncated_file};
pub use stale::is_temporary_name;
pub use temporary::NewDirectories;
pub use temporary_directory::TemporaryDirectory;
pub use transaction::{BACKUP_NAME, Transaction};

use std::path::Path;

/// Returns the directory of `path`; `.` for a bare file name.
pub fn parent_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// Checks that no input was truncated while it was mapped. Outputs must not be completed otherwise.
///
/// Without [`signals::install`] nothing is checked: a long-running program continues after such an error, and its later
/// outputs do not depend on the truncated file.
///
/// # Errors
/// [`Error::Truncated`] with the path of the input.
pub fn check_inputs() -> Result<(), Error> {
    match truncated_file().filter(|_| signals::are_installed()) {
        Some(path) => Err(Error::Truncated { path }),
        None => Ok(()),
    }
}

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
