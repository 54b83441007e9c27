//! Scratch memory of kernels. It grows on demand, and every operation reuses it.

use super::Device;
use crate::cuda::launch::Kernels;
use crate::cuda::{DeviceBuffer, Ptr, Result};
use crate::recorder::Routing;

/// A scratch buffer, by its purpose.
#[derive(Clone, Copy)]
pub enum Scratch {
    /// Quantized activations.
    Quantized,
    /// Routed tokens grouped by expert.
    Worklist,
    /// Partial results of attention.
    Attention,
    /// Positions of the tokens.
    Positions,
    /// Indices of the rows that `get_rows` copies.
    Rows,
    /// Matrices that were copied for one product: gate of experts, or any other matrix except up and down of experts.
    Gate,
    /// Up of experts, copied for one product.
    Up,
    /// Down of experts, copied for one product.
    Down,
    /// Addresses of transferred matrices.
    Table,
    /// Quantized hidden activations of the experts of one token, between up and down.
    Hidden,
    /// Slots and router weights of a lane of the hot cache.
    LaneEntries,
    /// Hidden activations of a lane.
    LaneHidden,
    /// Down products of a lane.
    LaneRows,
}

impl Scratch {
    pub(super) const COUNT: usize = Scratch::LaneRows as usize + 1;
}

impl Device {
    /// A scratch buffer of at least `bytes` bytes with unspecified contents.
    ///
    /// # Errors
    /// It does not fit.
    pub(crate) fn scratch(&mut self, which: Scratch, bytes: usize) -> Result<Ptr> {
        let room = &mut self.scratch[which as usize];
        if let Some(buffer) = room
            && buffer.size_bytes() >= bytes
        {
            return Ok(buffer.ptr());
        }
        // The old buffer is freed first: both at once may not fit.
        *room = None;
        let buffer = self.gpu.alloc(bytes.max(1).next_multiple_of(1 << 16))?;
        Ok(room.insert(buffer).ptr())
    }

    /// The positions of the tokens on the GPU. They are copied only if they have changed.
    ///
    /// # Errors
    /// They do not fit, or the copy cannot be started.
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

    /// Scratch memory for `rows` quantized rows of `n_in` activations.
    ///
    /// # Errors
    /// It does not fit.
    pub(crate) fn quantized(&mut self, rows: usize, n_in: usize) -> Result<Ptr> {
        self.scratch(Scratch::Quantized, Kernels::scratch_size(rows, n_in))
    }

    /// Scratch memory for grouping the routed tokens by expert.
    ///
    /// # Errors
    /// It does not fit.
    pub(crate) fn worklist(&mut self, routing: &Routing, n_expert: usize) -> Result<Ptr> {
        let k = routing.n_expert_used;
        let bytes = Kernels::work_size(routing.ids.len() / k.max(1), k, n_expert);
        self.scratch(Scratch::Worklist, bytes)
    }
}
