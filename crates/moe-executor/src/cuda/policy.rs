//! Who computes what on a machine with a GPU, and what a GPU reports of itself.

use super::Error;

/// What becomes of the chosen experts whose weights live with the host, when there are few rows.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Policy {
    /// The host computes them.
    #[default]
    Cpu,
    /// They are copied to the GPU when they are chosen, and computed there.
    Gpu,
    /// The host computes gate and up while down is copied to the GPU.
    PostFetch,
}

/// What went wrong on the GPU and was done by the host.
#[derive(Debug, Default, Clone)]
pub struct Fallbacks {
    /// Operations.
    pub ops: u64,
    /// Tensors that found no room.
    pub tensors: Vec<String>,
    /// The first error.
    pub first: Option<String>,
}

impl Fallbacks {
    /// Keeps the first error.
    pub(crate) fn note(&mut self, error: &Error) {
        self.first.get_or_insert_with(|| error.to_string());
    }
}

/// A GPU to open.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct GpuSpec {
    /// Number of the physical GPU, by the driver's count from 0.
    pub ordinal: usize,
    /// Bytes of its memory that may be used; `None`: all that are free.
    pub limit: Option<u64>,
}

/// What a GPU says of itself.
#[derive(Debug, Clone)]
pub struct GpuInfo {
    /// Number of the physical GPU, by the driver's count from 0.
    pub ordinal: usize,
    /// Its name.
    pub name: String,
    /// Compute capability, major and minor.
    pub compute_capability: (i32, i32),
    /// Bytes of its memory.
    pub memory_bytes: u64,
    /// Bytes of it that were free when it was opened.
    pub free_bytes: u64,
    /// Version of CUDA that its driver knows, such as 12040.
    pub driver: i32,
}
