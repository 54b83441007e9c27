//! Work that a GPU left to the CPU.

use super::Error;

/// Operations and tensors that a GPU left to the CPU.
#[derive(Debug, Default, Clone)]
pub struct Fallbacks {
    /// Number of operations that failed on the GPU.
    pub ops: u64,
    /// Names of the tensors that did not fit into GPU memory.
    pub tensors: Vec<String>,
    /// Message of the first error.
    pub first: Option<String>,
}

impl Fallbacks {
    /// Keeps the message of `error` if it is the first one.
    pub(crate) fn note(&mut self, error: &Error) {
        self.first.get_or_insert_with(|| error.to_string());
    }
}
