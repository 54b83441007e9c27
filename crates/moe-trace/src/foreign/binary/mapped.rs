//! A file's bytes, mapped.

use std::ops::Deref;
use std::path::Path;

use memmap2::Mmap;

use crate::foreign::ForeignError;
use crate::foreign::source;

/// The bytes of a file; nothing of it is read before it is looked at.
#[derive(Debug)]
pub(crate) struct Mapped(Option<Mmap>);

impl Mapped {
    /// Maps a regular file.
    pub(crate) fn open(path: &Path) -> Result<Self, ForeignError> {
        let file = source::open(path)?;
        let size = file.metadata().map_err(ForeignError::io("open", path))?;
        if size.len() == 0 {
            return Ok(Self(None)); // an empty file cannot be mapped
        }
        // SAFETY: the map is read only and used as bytes. Should another process cut the file, reading past its end raises
        // SIGBUS.
        let map = unsafe { Mmap::map(&file) }.map_err(ForeignError::io("map", path))?;
        Ok(Self(Some(map)))
    }
}

impl Deref for Mapped {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.0.as_deref().unwrap_or_default()
    }
}
