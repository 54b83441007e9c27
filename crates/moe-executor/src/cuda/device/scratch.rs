//! Scratch memory of kernels. It grows on demand, and every operation reuses it.

use super::Device;
use crate::cuda::launch::Kernels;
use crate::cuda::{DeviceBuffer, Ptr, Result};
use crate::kv_cache::Batch;
use crate::recorder::Routing;

/// A scratch buffer, by its purpose.
#[derive(Clone, Copy)]
pub enum Scratch {
    /// Quantized activations, or activations in 16 bits.
    Quantized,
    /// Routed tokens grouped by expert.
    Worklist,
    /// Partial results of attention.
    Attention,
    /// Places of the tokens in the KV cache.
    Places,
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
    /// Numbers of heads.
    HeadNumbers,
    /// Inputs of products of heads, without gaps.
    HeadInputs,
    /// Products of heads, without gaps.
    HeadProducts,
}

impl Scratch {
    pub(super) const COUNT: usize = Scratch::HeadProducts as usize + 1;
}

/// Places of the tokens of a pass in the KV cache: addresses of u32 `(tokens)`.
#[derive(Clone, Copy)]
pub(crate) struct Places {
    /// Position of each token in its sequence.
    pub positions: Ptr,
    /// Row of each token in the keys or values of a layer.
    pub rows: Ptr,
    /// Sequence of each token.
    pub sequences: Ptr,
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

    /// Places of the tokens in the KV cache, on the GPU. They are copied only if they have changed.
    ///
    /// # Errors
    /// They do not fit, or the copy cannot be started.
    pub(crate) fn places(&mut self, batch: Batch) -> Result<Places> {
        let n = batch.positions.len();
        let mut places = Vec::with_capacity(3 * n);
        places.extend(batch.positions);
        for run in batch.runs {
            let positions = &batch.positions[run.tokens.clone()];
            places.extend(
                positions
                    .iter()
                    .map(|at| at * batch.n_seq as u32 + run.sequence as u32),
            );
        }
        for run in batch.runs {
            places.extend(run.tokens.clone().map(|_| run.sequence as u32));
        }
        let room = self.scratch[Scratch::Places as usize].as_ref();
        let before = room.map(DeviceBuffer::ptr);
        let ptr = self.scratch(Scratch::Places, size_of_val(places.as_slice()))?;
        if self.places != places || before != Some(ptr) {
            self.gpu.upload(ptr, places.as_slice())?;
            self.places = places;
        }
        let part = |index| ptr.offset(index * n * size_of::<u32>());
        Ok(Places {
            positions: part(0),
            rows: part(1),
            sequences: part(2),
        })
    }

    /// The number of each of the `n_head` heads of `rows` rows, i32 `(rows, n_head)`, on the GPU. They are copied only if they have changed.
    ///
    /// # Errors
    /// They do not fit, or the copy cannot be started.
    pub(crate) fn head_numbers(&mut self, n_head: usize, rows: usize) -> Result<Ptr> {
        let room = self.scratch[Scratch::HeadNumbers as usize].as_ref();
        let before = room.map(DeviceBuffer::ptr);
        let ptr = self.scratch(Scratch::HeadNumbers, rows * n_head * size_of::<u32>())?;
        let (known_heads, known_rows) = self.head_numbers;
        if known_heads != n_head || known_rows < rows || before != Some(ptr) {
            let numbers: Vec<u32> = (0..rows).flat_map(|_| (0..).take(n_head)).collect();
            self.gpu.upload(ptr, numbers.as_slice())?;
            self.head_numbers = (n_head, rows);
        }
        Ok(ptr)
    }

    /// Scratch memory for `rows` converted rows of `n_in` activations.
    ///
    /// # Errors
    /// It does not fit.
    pub(crate) fn quantized(&mut self, rows: usize, n_in: usize) -> Result<Ptr> {
        self.scratch(Scratch::Quantized, Kernels::converted_size(rows, n_in))
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
