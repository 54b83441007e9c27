//! Shared bytes of a mapped file, of a static, or of the heap. Cloning is cheap.

use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::sync::Arc;

use moe_files::MappedFile;

#[derive(Clone, Debug)]
pub(crate) enum Bytes {
    Mapped(Arc<MappedFile>),
    Static(&'static [u8]),
    Owned(Arc<[u8]>),
}

impl Bytes {
    /// Maps a complete file for reading.
    pub(crate) fn map(path: &Path) -> io::Result<Bytes> {
        // Checked before the file is opened: opening a pipe waits for a writer.
        let metadata = fs::metadata(path)?;
        if !metadata.is_file() {
            let kind = if metadata.is_dir() {
                "a directory"
            } else {
                "a pipe or device"
            };
            let message = format!("it is {kind}; pass a GGUF file");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
        }
        let file = File::open(path)?;
        let map = MappedFile::new(&file, path)?;
        Ok(Bytes::Mapped(Arc::new(map)))
    }

    pub(crate) fn as_slice(&self) -> &[u8] {
        match self {
            Bytes::Mapped(map) => map,
            Bytes::Static(bytes) => bytes,
            Bytes::Owned(bytes) => bytes,
        }
    }

    /// Returns the bytes `offset .. offset + size`, or `None` if they are not all inside the file.
    pub(crate) fn range(&self, offset: u64, size: u64) -> Option<&[u8]> {
        let start = usize::try_from(offset).ok()?;
        let end = usize::try_from(offset.checked_add(size)?).ok()?;
        self.as_slice().get(start..end)
    }
}
