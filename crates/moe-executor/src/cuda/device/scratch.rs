//! Scratch memory of kernels. It grows on demand, and every operation reuses it.

use std::ops::Range;

use super::Device;
use crate::cuda::launch::{Kernels, Runs};
use crate::cuda::{DeviceBuffer, Ptr, Result};
use crate::kv_cache::{Batch, Run};
use crate::recorder::Routing;

/// A scratch buffer, by its purpose.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub enum Scratch {
    /// Quantized activations.
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
    /// The sequences of a pass.
    Runs,
}

impl Scratch {
    pub(super) const COUNT: usize = Scratch::Runs as usize + 1;
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

/// Indices of consecutive runs of different sequences.
fn groups_of(runs: &[Run]) -> impl Iterator<Item = Range<usize>> {
    let mut first = 0;
    std::iter::from_fn(move || {
        let rest = &runs[first..];
        let continues = |n: &usize| {
            let mut before = rest[..*n].iter();
            before.any(|run| run.sequence == rest[*n].sequence)
        };
        let n = (1..rest.len()).find(continues).unwrap_or(rest.len());
        first += n;
        (n > 0).then_some(first - n..first)
    })
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
        let ptr = self.upload_changed(Scratch::Places, places)?;
        let part = |index| ptr.offset(index * n * size_of::<u32>());
        Ok(Places {
            positions: part(0),
            rows: part(1),
            sequences: part(2),
        })
    }

    /// The sequences of a pass on the GPU, in groups of different sequences: the next group continues sequences of those before it.
    ///
    /// # Errors
    /// They do not fit, or the copy cannot be started.
    pub(crate) fn runs(&mut self, runs: &[Run]) -> Result<Vec<Runs>> {
        let of_run = |run: &Run| [run.sequence, run.tokens.start, run.tokens.len()];
        let values = runs.iter().flat_map(of_run).map(|n| n as u32);
        let at = self.upload_changed(Scratch::Runs, values.collect())?;
        let group = |group: Range<usize>| {
            let longest = runs[group.clone()].iter().map(|run| run.tokens.len()).max();
            Runs {
                at: at.offset(group.start * 3 * size_of::<u32>()),
                n: group.len(),
                longest: longest.unwrap_or(0),
            }
        };
        Ok(groups_of(runs).map(group).collect())
    }

    /// Values in a scratch buffer that is used for nothing else. They are copied only if they have changed.
    fn upload_changed(&mut self, which: Scratch, values: Vec<u32>) -> Result<Ptr> {
        let room = self.scratch[which as usize].as_ref();
        let before = room.map(DeviceBuffer::ptr);
        let ptr = self.scratch(which, size_of_val(values.as_slice()))?;
        if self.uploaded.get(&which) != Some(&values) || before != Some(ptr) {
            self.gpu.upload(ptr, values.as_slice())?;
            self.uploaded.insert(which, values);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sequence_continues_in_the_next_group() {
        let groups = |sequences: &[usize]| {
            let run = |&sequence: &usize| Run {
                sequence,
                tokens: 0..1,
            };
            let runs: Vec<Run> = sequences.iter().map(run).collect();
            let groups = groups_of(&runs).map(|group| (group.start, group.end));
            groups.collect::<Vec<_>>()
        };
        assert!(groups(&[]).is_empty());
        assert_eq!(groups(&[5, 0, 2]), [(0, 3)]);
        assert_eq!(groups(&[1, 0, 1, 2, 0, 2]), [(0, 2), (2, 5), (5, 6)]);
    }
}
