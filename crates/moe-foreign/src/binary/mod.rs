//! Files that are no text: mapped, arrays of NumPy and PyTorch, and arrays written as nested lists.

pub(crate) mod array;
pub(crate) mod fault;
pub(crate) mod mapped;
pub(crate) mod nested;
pub(crate) mod npy;
pub(crate) mod pickle;
pub(crate) mod torch;
