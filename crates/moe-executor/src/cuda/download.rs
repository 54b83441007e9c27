//! The choices of a pass on their way to the host, in the order of the GPU's stream: recording adds no wait to it.

use zerocopy::FromBytes;

use super::{Gpu, Pinned, Ptr, Result};

/// Bytes of a piece of pinned memory, if no single choice needs more.
const PIECE: usize = 1 << 20;

/// Where the experts of a choice and their weights will lie.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Download {
    gpu: usize,
    piece: usize,
    at: usize,
    n: usize,
}

impl Download {
    /// Index of the GPU that they are copied from.
    pub fn gpu(&self) -> usize {
        self.gpu
    }
}

/// Pinned memory for the choices of a pass. A piece stays where it is while copies into it are under way.
#[derive(Default)]
pub(super) struct Downloads {
    pieces: Vec<Pinned>,
    /// The piece in use, and its bytes in use.
    piece: usize,
    used: usize,
}

impl Downloads {
    /// Forgets the choices of the pass before.
    pub(super) fn clear(&mut self) {
        (self.piece, self.used) = (0, 0);
    }

    /// Begins to copy `n` experts and their weights.
    pub(super) fn begin(
        &mut self,
        gpu: &Gpu,
        ids: Ptr,
        weights: Ptr,
        n: usize,
    ) -> Result<Download> {
        let bytes = n * size_of::<i32>();
        while let Some(piece) = self.pieces.get(self.piece)
            && self.used + 2 * bytes > piece.len()
        {
            (self.piece, self.used) = (self.piece + 1, 0);
        }
        if self.piece == self.pieces.len() {
            self.pieces.push(gpu.pinned((2 * bytes).max(PIECE))?);
        }
        let download = Download {
            gpu: gpu.index(),
            piece: self.piece,
            at: self.used,
            n,
        };
        let piece = &self.pieces[self.piece];
        // SAFETY: the place is this copy's until `clear`, which the next pass starts with; `get` reads it once the pass has ended
        // with a wait. Dropping pinned memory waits for the GPU.
        unsafe {
            gpu.begin_download(ids, piece, self.used, bytes)?;
            gpu.begin_download(weights, piece, self.used + bytes, bytes)?;
        }
        self.used += 2 * bytes;
        Ok(download)
    }

    /// Experts and weights, which have arrived.
    ///
    /// # Safety
    /// The stream that the copies were begun on was waited for, and none was begun since.
    pub(super) unsafe fn get(&self, download: &Download) -> (&[i32], &[f32]) {
        let bytes = download.n * size_of::<i32>();
        // SAFETY: no copy is under way, by the caller's promise; one needs `&mut self` to start.
        let piece = unsafe { self.pieces[download.piece].bytes() };
        let (ids, weights) = piece[download.at..][..2 * bytes].split_at(bytes);
        let aligned = "pieces are pages, and what lies in them has four bytes each";
        (
            <[i32]>::ref_from_bytes(ids).expect(aligned),
            <[f32]>::ref_from_bytes(weights).expect(aligned),
        )
    }
}
