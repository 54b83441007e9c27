//! The directory of temporary tables.

use std::path::{Path, PathBuf};

use moe_files::{TemporaryDirectory, parent_of};

use crate::large_output;

/// Makes the directory when the first table is written into it. Dropped, or ended by a signal, it is removed.
pub struct Temporary {
    parent: PathBuf,
    directory: Option<TemporaryDirectory>,
    n_entries: usize,
}

impl Temporary {
    /// Next to the output, or where the system has its temporary files.
    pub fn new(out: Option<&Path>) -> Self {
        Self {
            parent: out.map_or_else(std::env::temp_dir, |out| parent_of(out).to_owned()),
            directory: None,
            n_entries: 0,
        }
    }

    /// A path for a file or directory of about `size` bytes. Nothing exists there.
    ///
    /// # Errors
    /// So many bytes are not free, or the directory cannot be made.
    pub fn path(&mut self, name: &str, size: u64) -> anyhow::Result<PathBuf> {
        large_output::check_room(&self.parent.join("temporary tables"), size)?;
        let directory = match &mut self.directory {
            Some(directory) => directory,
            none => none.insert(TemporaryDirectory::create(&self.parent, "sql")?),
        };
        self.n_entries += 1;
        Ok(directory.path().join(format!("{}-{name}", self.n_entries)))
    }
}
