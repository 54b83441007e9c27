//! Which GPUs to open, and properties of opened GPUs.

/// A GPU to open.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct GpuSpec {
    /// Number of the physical GPU as the driver counts, from 0.
    pub ordinal: usize,
    /// Limit of GPU memory in bytes; `None`: all free memory.
    pub limit: Option<u64>,
}

/// Properties of an opened GPU.
#[derive(Debug, Clone)]
pub struct GpuInfo {
    /// Number of the physical GPU as the driver counts, from 0.
    pub ordinal: usize,
    /// Product name.
    pub name: String,
    /// Compute capability, major and minor.
    pub compute_capability: (i32, i32),
    /// Total memory in bytes.
    pub memory_bytes: u64,
    /// Free memory in bytes when it was opened.
    pub free_bytes: u64,
    /// Newest CUDA version that the driver supports, such as 12040 for 12.4.
    pub driver: i32,
}
