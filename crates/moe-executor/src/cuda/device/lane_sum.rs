//! The sum of the lanes on the CPU, in pinned memory that a kernel reads.

use zerocopy::IntoBytes;

use super::Device;
use crate::cuda::{Pinned, Ptr, Result};

/// Largest sum that a kernel reads from CPU memory, in bytes. It is faster than a copy if the time of starting one is longer than
/// the transfer.
const MAX_BYTES: usize = 64 << 10;

/// Pinned memory for a sum.
#[derive(Default)]
pub(super) struct LaneSum {
    memory: Option<Pinned>,
    /// Number of waits for the compute stream before the last kernel that reads the memory was launched.
    waits: Option<u64>,
}

impl Device {
    /// Address of a copy of `values` for the next kernel on the compute stream; `None` if they are too large.
    ///
    /// # Errors
    /// Pinned memory cannot be allocated, or earlier work failed.
    pub(in crate::cuda) fn pinned_sum(&mut self, values: &[f32]) -> Result<Option<Ptr>> {
        let bytes = values.as_bytes();
        if bytes.len() > MAX_BYTES {
            return Ok(None);
        }
        if self.lane_sum.waits == Some(self.gpu.waits()) {
            self.gpu.synchronize()?;
        }
        let memory = match self.lane_sum.memory.take() {
            Some(memory) if memory.len() >= bytes.len() => memory,
            _ => self.gpu.pinned(bytes.len().next_power_of_two())?,
        };
        let memory = self.lane_sum.memory.insert(memory);
        // SAFETY: only kernels on the compute stream read the memory, and the CPU has waited for the stream since the last one was
        // launched.
        unsafe { memory.write(bytes) };
        self.lane_sum.waits = Some(self.gpu.waits());
        Ok(Some(memory.ptr()))
    }
}
