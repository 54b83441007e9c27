//! The routing decisions of a pass on the CPU. Routers on the GPU also write theirs to a log, which is copied when the pass ends;
//! others are copied by themselves. Nothing waits for the copies before the pass ends: recording adds no wait.

use zerocopy::FromBytes;

use super::pass_log::PassLog;
use super::{Gpu, Pinned, Ptr, Result};

/// Smallest size of a block of pinned memory in bytes.
const BLOCK_BYTES: usize = 1 << 20;

/// The copy of the selected experts of a layer and their weights: where it is after the pass.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Download {
    gpu: usize,
    place: Place,
    /// Offset in the log or in the block in bytes.
    at: usize,
    /// Number of experts.
    n: usize,
    /// Whether the weights were copied, too.
    has_weights: bool,
}

impl Download {
    /// Index of the GPU that is copied from.
    pub fn gpu(&self) -> usize {
        self.gpu
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Place {
    Log,
    /// A block of [`Downloads`].
    Block(usize),
}

/// Pinned memory for the routing decisions of a pass.
#[derive(Default)]
pub(super) struct Downloads {
    /// What routers write.
    log: PassLog,
    /// For other copies. Blocks never move.
    blocks: Vec<Pinned>,
    /// Index of the current block, and its bytes in use.
    block: usize,
    used: usize,
}

impl Downloads {
    /// Removes the copies of the previous pass.
    pub(super) fn clear(&mut self) {
        (self.block, self.used) = (0, 0);
        self.log.clear();
    }

    /// Reserves a part of the log for `n` selected experts and their weights. Returns its address, or `None` without room.
    pub(super) fn reserve(&mut self, gpu: &Gpu, n: usize) -> Option<(Ptr, Download)> {
        let (at, ptr) = self.log.reserve(gpu, 2 * n * size_of::<i32>())?;
        let download = Download {
            gpu: gpu.index(),
            place: Place::Log,
            at,
            n,
            has_weights: true,
        };
        Some((ptr, download))
    }

    /// Starts the D2H copy of the log, unless everything so far is copied.
    ///
    /// # Errors
    /// The copy cannot be started.
    pub(super) fn copy_log(&mut self, gpu: &Gpu) -> Result<()> {
        self.log.begin_copy(gpu)
    }

    /// Starts the copies of `n` selected experts, and of their weights if they are given.
    ///
    /// # Errors
    /// Pinned memory cannot be allocated, or a copy cannot be started.
    pub(super) fn copy(
        &mut self,
        gpu: &Gpu,
        ids: Ptr,
        weights: Option<Ptr>,
        n: usize,
    ) -> Result<Download> {
        let bytes = n * size_of::<i32>();
        while let Some(block) = self.blocks.get(self.block)
            && self.used + 2 * bytes > block.len()
        {
            (self.block, self.used) = (self.block + 1, 0);
        }
        if self.block == self.blocks.len() {
            self.blocks.push(gpu.pinned((2 * bytes).max(BLOCK_BYTES))?);
        }
        let download = Download {
            gpu: gpu.index(),
            place: Place::Block(self.block),
            at: self.used,
            n,
            has_weights: weights.is_some(),
        };
        let block = &self.blocks[self.block];
        // SAFETY: this range is used by no other copy before `clear` at the start of the next pass. `get` reads it after the wait
        // at the end of the pass. Dropping pinned memory waits for the GPU. The caller passes allocations of `n` elements.
        unsafe {
            gpu.begin_download(ids, block, self.used, bytes)?;
            if let Some(weights) = weights {
                gpu.begin_download(weights, block, self.used + bytes, bytes)?;
            }
        }
        self.used += 2 * bytes;
        Ok(download)
    }

    /// Selected experts and their weights; no weights if they were not copied.
    ///
    /// # Safety
    /// The compute stream was waited for after the copies were started, and none was started since.
    pub(super) unsafe fn get(&self, download: &Download) -> (&[i32], &[f32]) {
        let bytes = download.n * size_of::<i32>();
        // SAFETY: the caller ensures that no copy is in flight.
        let block = unsafe {
            match download.place {
                Place::Block(block) => self.blocks[block].bytes(),
                Place::Log => self.log.copy(),
            }
        };
        let (ids, weights) = block[download.at..][..2 * bytes].split_at(bytes);
        let weights = if download.has_weights {
            weights
        } else {
            &weights[..0]
        };
        let aligned = "blocks are page-aligned, and all values have four bytes";
        (
            <[i32]>::ref_from_bytes(ids).expect(aligned),
            <[f32]>::ref_from_bytes(weights).expect(aligned),
        )
    }
}
