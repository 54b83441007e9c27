//! Where experts are computed, which GPUs are opened, and what is known of them.

use super::Error;

/// Where the selected experts are computed if their weights are in CPU memory and there are few tokens.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Policy {
    /// On the CPU.
    #[default]
    Cpu,
    /// On the GPU, after an H2D copy of the selected experts.
    Gpu,
    /// Gate and up on the CPU, down on the GPU: the H2D copy of down overlaps with gate and up.
    PostFetch,
}

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
