//! The files of a table in a dataset.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use crate::error::Error;

/// The Parquet files of a table in a dataset, `DIR/TABLE/run=ID/*.parquet`, sorted by name; empty if there are none.
///
/// # Errors
/// [`Error::Io`] if a directory cannot be read.
pub fn dataset_parts(dataset: &Path, table: &str) -> Result<Vec<PathBuf>, Error> {
    let mut parts = Vec::new();
    for run in entries(&dataset.join(table))? {
        parts.extend(entries(&run)?);
    }
    parts.retain(|part| {
        part.extension()
            .is_some_and(|extension| extension == "parquet")
    });
    Ok(parts)
}

/// The entries of a directory, sorted by name; empty if there is no such directory.
fn entries(dir: &Path) -> Result<Vec<PathBuf>, Error> {
    match fs::metadata(dir) {
        Ok(found) if found.is_dir() => {}
        Ok(_) => return Ok(Vec::new()),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            return Ok(Vec::new());
        }
        Err(error) => return Err(Error::io("open", dir)(error)),
    }
    let entries: std::io::Result<Vec<_>> =
        fs::read_dir(dir).and_then(|entries| entries.map(|entry| Ok(entry?.path())).collect());
    let mut entries = entries.map_err(Error::io("list", dir))?;
    entries.sort();
    Ok(entries)
}
