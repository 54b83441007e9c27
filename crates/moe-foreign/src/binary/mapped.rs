//! [`Mapped`]: a memory-mapped file.

use std::ops::Deref;
use std::path::Path;

use moe_files::MappedFile;

use crate::{ForeignError, source};

/// The bytes of a memory-mapped file.
#[derive(Debug)]
pub(crate) struct Mapped(MappedFile);

impl Mapped {
    /// Maps a regular file.
    pub(crate) fn open(path: &Path) -> Result<Self, ForeignError> {
        let file = source::open(path)?;
        let map = MappedFile::new(&file, path).map_err(ForeignError::io("map", path))?;
        Ok(Self(map))
    }
}

impl Deref for Mapped {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}
