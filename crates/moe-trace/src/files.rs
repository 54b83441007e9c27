//! Files that appear whole or not at all.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use crate::error::Error;

/// A file under a temporary name; [`PendingFile::commit`] gives it its own, dropping it removes it.
#[derive(Debug)]
pub(crate) struct PendingFile {
    path: PathBuf,
    temporary: PathBuf,
    committed: bool,
}

impl PendingFile {
    /// Creates the temporary file beside `path` and hands it out for writing.
    ///
    /// Refuses a `path` that exists, unless `force`.
    pub(crate) fn create(path: &Path, force: bool) -> Result<(Self, File), Error> {
        if !force && path.symlink_metadata().is_ok() {
            return Err(Error::Exists {
                path: path.to_owned(),
            });
        }
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let temporary = path.with_file_name(format!(".{name}.{}.tmp", std::process::id()));
        let file = File::create(&temporary).map_err(Error::io("create", &temporary))?;
        Ok((
            Self {
                path: path.to_owned(),
                temporary,
                committed: false,
            },
            file,
        ))
    }

    /// Where the file will be.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Puts the file in its place.
    pub(crate) fn commit(mut self) -> Result<(), Error> {
        fs::rename(&self.temporary, &self.path).map_err(Error::io("replace", &self.path))?;
        self.committed = true;
        Ok(())
    }
}

impl Drop for PendingFile {
    fn drop(&mut self) {
        if !self.committed {
            // Best effort: a leftover temporary file is never read.
            let _ = fs::remove_file(&self.temporary);
        }
    }
}

/// Writes `bytes` to `path` through a temporary file, replacing what is there.
pub(crate) fn write_whole(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    use std::io::Write;
    let (pending, mut file) = PendingFile::create(path, true)?;
    file.write_all(bytes).map_err(Error::io("write", path))?;
    pending.commit()
}
