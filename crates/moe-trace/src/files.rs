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

/// Directories that were made for files to come; dropping it before [`MadeDirectories::keep`] removes those that are empty.
#[derive(Debug, Default)]
pub(crate) struct MadeDirectories {
    /// Innermost last.
    made: Vec<PathBuf>,
}

impl MadeDirectories {
    /// Makes `dir` and what is missing above it.
    pub(crate) fn create(&mut self, dir: &Path) -> Result<(), Error> {
        let missing = dir
            .ancestors()
            .take_while(|dir| !dir.as_os_str().is_empty() && dir.symlink_metadata().is_err());
        let missing: Vec<PathBuf> = missing.map(Path::to_owned).collect();
        fs::create_dir_all(dir).map_err(Error::io("create", dir))?;
        self.made.extend(missing.into_iter().rev());
        Ok(())
    }

    /// Lets them stay.
    pub(crate) fn keep(&mut self) {
        self.made.clear();
    }
}

impl Drop for MadeDirectories {
    fn drop(&mut self) {
        for dir in self.made.iter().rev() {
            // What is not empty stays.
            let _ = fs::remove_dir(dir);
        }
    }
}

/// Writes `bytes` for `path`, which is as before until the file is committed.
pub(crate) fn write_pending(path: &Path, bytes: &[u8]) -> Result<PendingFile, Error> {
    use std::io::Write;
    let (pending, mut file) = PendingFile::create(path, true)?;
    file.write_all(bytes).map_err(Error::writing(path))?;
    Ok(pending)
}
