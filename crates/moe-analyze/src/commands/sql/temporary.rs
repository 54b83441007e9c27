//! The directory of temporary tables.

use std::path::{Path, PathBuf};

use moe_files::{TemporaryDirectory, parent_of};

use crate::large_output;

/// A temporary directory, created when the first table is written. It is removed on drop and after a signal.
pub struct Temporary {
    parent: PathBuf,
    directory: Option<TemporaryDirectory>,
    n_entries: usize,
}

impl Temporary {
    /// The directory is created next to the output, or in the system's temporary directory.
    pub fn new(out: Option<&Path>) -> Self {
        Self {
            parent: out.map_or_else(std::env::temp_dir, |out| parent_of(out).to_owned()),
            directory: None,
            n_entries: 0,
        }
    }

    /// Returns a new path for a file or directory of about `size` bytes.
    ///
    /// # Errors
    /// There is not enough free space, or the directory cannot be created.
    pub fn path(&mut self, name: &str, size: u64) -> anyhow::Result<PathBuf> {
        large_output::check_free_space(&self.parent.join("temporary-tables"), size)?;
        let directory = match &mut self.directory {
            Some(directory) => directory,
            none => none.insert(TemporaryDirectory::create(&self.parent, "sql")?),
        };
        self.n_entries += 1;
        Ok(directory.path().join(format!("{}-{name}", self.n_entries)))
    }
}
