//! What a reader of a binary format found wrong, before the file's name is known.

/// A fault and the byte at which it was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BinaryFault {
    /// Counted from the first byte that the reader was given.
    pub(crate) offset: u64,
    /// What is wrong, and what to do about it.
    pub(crate) reason: String,
}

impl BinaryFault {
    pub(crate) fn at(offset: usize, reason: impl Into<String>) -> Self {
        Self {
            offset: offset as u64,
            reason: reason.into(),
        }
    }
}
