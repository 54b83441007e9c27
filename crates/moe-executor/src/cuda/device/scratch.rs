//! Memory that kernels use beside what they read and write. It grows as it is asked for, and is used anew by every operation.

use super::Device;
use crate::cuda::launch::Kernels;
use crate::cuda::{DeviceBuffer, Ptr, Result};
use crate::recorder::Routing;

/// Memory that kernels use beside what they read and write.
#[derive(Clone, Copy)]
pub enum Scratch {
    /// Quantized activations.
    Quantized,
    /// Rows grouped by expert.
    Worklist,
    /// Partial results of attention.
    Attention,
    /// Positions of the rows.
    Positions,
    /// Numbers of the rows that are wanted.
    Rows,
    /// Experts that were copied for one product: of gate, up and down.
    Gate,
    /// Of up.
    Up,
    /// Of down.
    Down,
    /// Addresses of matrices.
    Table,
    /// What a token's experts have between up and down, quantized.
    Hidden,
}

impl Scratch {
    pub(super) const ALL: usize = Scratch::Hidden as usize + 1;
}

impl Device {
    /// Memory for a kernel, at least `bytes`, contents unspecified.
    ///
    /// # Errors
    /// There is no room.
    pub(crate) fn scratch(&mut self, which: Scratch, bytes: usize) -> Result<Ptr> {
        let room = &mut self.scratch[which as usize];
        if let Some(buffer) = room
            && buffer.size_bytes() >= bytes
        {
            return Ok(buffer.ptr());
        }
        // The old one goes first: both at once may not fit.
        *room = None;
        let buffer = self.gpu.alloc(bytes.max(1).next_multiple_of(1 << 16))?;
        Ok(room.insert(buffer).ptr())
    }

    /// The positions of a pass's rows on the GPU.
    ///
    /// # Errors
    /// There is no room, or the copy failed.
    pub(crate) fn positions(&mut self, positions: &[u32]) -> Result<Ptr> {
        let room = self.scratch[Scratch::Positions as usize].as_ref();
        let before = room.map(DeviceBuffer::ptr);
        let ptr = self.scratch(Scratch::Positions, size_of_val(positions))?;
        if self.positions != positions || before != Some(ptr) {
            self.gpu.upload(ptr, positions)?;
            self.positions.clear();
            self.positions.extend(positions);
        }
        Ok(ptr)
    }

    /// Memory for the activations of a product of `rows` rows of `n_in` elements.
    ///
    /// # Errors
    /// There is no room.
    pub(crate) fn quantized(&mut self, rows: usize, n_in: usize) -> Result<Ptr> {
        self.scratch(Scratch::Quantized, Kernels::scratch_size(rows, n_in))
    }

    /// Memory for the rows of a choice, grouped by expert.
    ///
    /// # Errors
    /// There is no room.
    pub(crate) fn worklist(&mut self, routing: &Routing, n_expert: usize) -> Result<Ptr> {
        let k = routing.n_expert_used;
        let bytes = Kernels::work_size(routing.ids.len() / k.max(1), k, n_expert);
        self.scratch(Scratch::Worklist, bytes)
    }
}
