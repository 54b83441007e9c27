//! Readers for binary files (NumPy, PyTorch), and arrays as views of their bytes.

pub(crate) mod array;
pub(crate) mod error;
pub(crate) mod mapped;
pub(crate) mod nested;
pub(crate) mod npy;
pub(crate) mod pickle;
pub(crate) mod torch;
