//! [`BinaryError`]: an error in a binary file, without the path of the file.

/// An error and the byte offset where it was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BinaryError {
    /// Offset in the bytes that the reader received.
    pub(crate) offset: u64,
    /// What is wrong and what to do.
    pub(crate) reason: String,
}

impl BinaryError {
    pub(crate) fn at(offset: usize, reason: impl Into<String>) -> Self {
        Self {
            offset: offset as u64,
            reason: reason.into(),
        }
    }
}
