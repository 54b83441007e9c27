//! The keys or the values of a layer in the type of the cache.

use std::collections::TryReserveError;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::CacheType;
use crate::cpu::attention::Rows;
use crate::cuda;
use crate::mirrored::Mirrored;

/// The keys or the values of a layer: rows `(position, sequence, n_head_kv * width of a head)` with the memory layout of ggml's type.
pub struct CacheTensor {
    ty: CacheType,
    /// Elements of a row.
    width: usize,
    /// Bytes of a row.
    row_size: usize,
    /// The rows without gaps, in words of four bytes so that F32 and F16 are aligned.
    pub words: Mirrored<u32>,
}

impl CacheTensor {
    /// No rows of `width` elements, a multiple of the block size of `ty`.
    pub fn new(ty: CacheType, width: usize) -> CacheTensor {
        CacheTensor {
            ty,
            width,
            row_size: ty.row_size(width),
            words: Mirrored::default(),
        }
    }

    /// Type of the elements.
    pub fn ty(&self) -> CacheType {
        self.ty
    }

    /// Elements of a row; 0 for what the layer does not keep.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Bytes of a row.
    pub fn row_size(&self) -> usize {
        self.row_size
    }

    /// Reserves memory on the CPU for `rows` rows.
    ///
    /// # Errors
    /// The memory cannot be allocated.
    pub(super) fn try_reserve(&mut self, rows: usize) -> Result<(), TryReserveError> {
        self.words.try_reserve(self.words_of(rows))
    }

    /// Grows to `rows` rows and keeps the existing ones.
    ///
    /// # Errors
    /// Like [`Mirrored::grow`].
    pub fn grow(&mut self, rows: usize) -> cuda::Result<()> {
        self.words.grow(self.words_of(rows))
    }

    fn words_of(&self, rows: usize) -> usize {
        rows.saturating_mul(self.row_size)
            .div_ceil(size_of::<u32>())
    }

    /// Converts and stores a row. The values must be in CPU memory.
    pub fn store(&mut self, row: usize, values: &[f32]) {
        let bytes = self.words.host_mut().as_mut_bytes();
        let bytes = &mut bytes[row * self.row_size..][..self.row_size];
        self.ty.convert(values, bytes);
    }

    /// The rows of a sequence and those between them, from its first position on. The values must be in CPU memory.
    pub fn rows_from(&self, sequence: usize) -> Rows<'_> {
        let bytes = self.words.host().as_bytes();
        let n = bytes.len() / self.row_size.max(1) * self.row_size;
        let bytes = &bytes[(sequence * self.row_size).min(n)..n];
        match self.ty {
            CacheType::F32 => Rows::F32(aligned(bytes)),
            CacheType::F16 => Rows::F16(aligned(bytes)),
            CacheType::Q8_0 => Rows::Q8_0(aligned(bytes)),
        }
    }
}

/// The elements of rows, whose start is a multiple of the alignment of `T` because words are aligned, and rows consist of
/// complete elements.
fn aligned<T: FromBytes + Immutable + KnownLayout>(bytes: &[u8]) -> &[T] {
    <[T]>::ref_from_bytes(bytes).expect("rows consist of complete, aligned elements")
}
