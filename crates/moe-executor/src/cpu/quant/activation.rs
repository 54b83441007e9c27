//! Conversion of activations to the types that weights are multiplied with.
//!
//! The values are those of ggml, with the rounding of its x86 code. The memory layout differs: a row has all codes first, then
//! all scales, so that kernels load complete vectors of each.

use zerocopy::byteorder::little_endian::{F32, I16};
use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

use super::format::{Format, QK_K};

/// The type that activations are converted to before a product.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ActivationType {
    /// `f32`, not converted.
    F32,
    /// Rounded to half precision, stored as `f32`.
    F16,
    /// Rounded to bfloat16, stored as `f32`.
    Bf16,
    /// 8-bit codes with a half-precision scale per 32 elements.
    Q8_0,
    /// Like Q8_0, with `scale * sum of codes` per 32 elements, rounded to half precision, for formats with minima.
    Q8_1,
    /// 8-bit codes with an `f32` scale per 256 elements.
    Q8K,
}

/// The size of a row is a multiple of this, bytes.
const ROW_ALIGN: usize = 64;

impl ActivationType {
    /// Elements that share a scale.
    const fn block(self) -> usize {
        match self {
            ActivationType::F32 | ActivationType::F16 | ActivationType::Bf16 => 1,
            ActivationType::Q8_0 | ActivationType::Q8_1 => 32,
            ActivationType::Q8K => QK_K,
        }
    }

    /// Bytes of a row of `n` elements.
    pub fn row_size(self, n: usize) -> usize {
        let bytes = match self {
            ActivationType::F32 | ActivationType::F16 | ActivationType::Bf16 => 4 * n,
            ActivationType::Q8_0 | ActivationType::Q8K => n + 4 * (n / self.block()) + 2 * (n / 16),
            ActivationType::Q8_1 => n + 8 * (n / 32) + 2 * (n / 16),
        };
        bytes.next_multiple_of(ROW_ALIGN)
    }

    /// Converts a row.
    ///
    /// # Panics
    /// If the length of `out` is not [`ActivationType::row_size`], or the row is not a multiple of the block size.
    pub fn quantize(self, row: &[f32], out: &mut [u8]) {
        let n = row.len();
        assert_eq!(
            out.len(),
            self.row_size(n),
            "bytes of a row of {n} {self:?} activations"
        );
        assert_eq!(
            n % self.block(),
            0,
            "{n} activations are not a multiple of the block size of {self:?}"
        );
        #[cfg(target_arch = "x86_64")]
        if super::x86::has_avx2() {
            // SAFETY: `has_avx2` has detected the target features of the function.
            return unsafe { super::x86::avx2::quantize(self, row, out) };
        }
        self.convert(row, out);
    }

    /// Like [`ActivationType::quantize`], with portable code.
    pub fn convert(self, row: &[f32], out: &mut [u8]) {
        match self {
            ActivationType::F32 => round_each(row, out, |value| value),
            ActivationType::F16 => round_each(row, out, round_to_f16),
            ActivationType::Bf16 => round_each(row, out, round_to_bf16),
            ActivationType::Q8_0 | ActivationType::Q8_1 => quantize_q8_0(self, row, out),
            ActivationType::Q8K => quantize_q8_k(row, out),
        }
    }
}

/// The sections of a row of Q8_0, Q8_1 or Q8_K, in the order of the memory layout.
#[derive(Clone, Copy)]
pub struct Q8Row<'a> {
    /// The codes, -127 to 127.
    pub q: &'a [i8],
    /// The scale of each [`ActivationType::block`].
    pub scale: &'a [F32],
    /// The sum of the codes of each 16 elements.
    pub sum: &'a [I16],
    /// Scale times sum of each 32 elements; Q8_1 only.
    pub scaled_sum: &'a [F32],
}

/// A mutable [`Q8Row`].
pub struct Q8RowMut<'a> {
    pub q: &'a mut [i8],
    pub scale: &'a mut [F32],
    pub sum: &'a mut [I16],
    pub scaled_sum: &'a mut [F32],
}

impl<'a> Q8Row<'a> {
    /// A row without elements.
    pub const EMPTY: Q8Row<'static> = Q8Row {
        q: &[],
        scale: &[],
        sum: &[],
        scaled_sum: &[],
    };

    /// Splits a row of `n` elements.
    #[inline(always)]
    pub fn new(ty: ActivationType, n: usize, row: &'a [u8]) -> Q8Row<'a> {
        let (q, row) = prefix(row, n);
        let (scale, row) = prefix(row, n / ty.block());
        let (sum, row) = prefix(row, n / 16);
        let (scaled_sum, _) = prefix(
            row,
            if ty == ActivationType::Q8_1 {
                n / 32
            } else {
                0
            },
        );
        Q8Row {
            q,
            scale,
            sum,
            scaled_sum,
        }
    }
}

impl Q8Row<'_> {
    /// The part of the row from element `first` on, which must be the first of a block.
    pub fn starting_at(&self, first: usize) -> Self {
        let block = self.q.len() / self.scale.len();
        let scaled_sum = if self.scaled_sum.is_empty() {
            self.scaled_sum
        } else {
            &self.scaled_sum[first / 32..]
        };
        Q8Row {
            q: &self.q[first..],
            scale: &self.scale[first / block..],
            sum: &self.sum[first / 16..],
            scaled_sum,
        }
    }
}

/// Elements per scale in the activations of a format.
#[inline(always)]
pub const fn act_block<F: Format>() -> usize {
    F::ACTIVATION.block()
}

/// `scale * sum of codes` of the activations of each group of a format.
#[inline(always)]
pub fn sum_groups<F: Format>(row: &Q8Row, out: &mut [f32]) {
    if F::ACTIVATION == ActivationType::Q8_1 {
        for (out, sum) in out.iter_mut().zip(row.scaled_sum) {
            *out = sum.get();
        }
        return;
    }
    let per_block = QK_K / F::GROUP;
    let sums = row.sum.chunks_exact(F::GROUP / 16);
    for (group, (out, sums)) in out.iter_mut().zip(sums).enumerate() {
        let sum: i16 = sums.iter().map(|s| s.get()).sum();
        *out = row.scale[group / per_block].get() * f32::from(sum);
    }
}

impl<'a> Q8RowMut<'a> {
    /// Splits a row of `n` elements.
    pub fn new(ty: ActivationType, n: usize, row: &'a mut [u8]) -> Q8RowMut<'a> {
        let (q, row) = row.split_at_mut(n);
        let (scale, row) = row.split_at_mut(4 * (n / ty.block()));
        let (sum, row) = row.split_at_mut(2 * (n / 16));
        let (scaled_sum, _) = row.split_at_mut(if ty == ActivationType::Q8_1 {
            4 * (n / 32)
        } else {
            0
        });
        Q8RowMut {
            q: elements_mut(q),
            scale: elements_mut(scale),
            sum: elements_mut(sum),
            scaled_sum: elements_mut(scaled_sum),
        }
    }

    /// Computes the sums of codes.
    fn fill_sums(&mut self) {
        for (sum, codes) in self.sum.iter_mut().zip(self.q.chunks_exact(16)) {
            sum.set(codes.iter().map(|&q| i16::from(q)).sum());
        }
    }
}

/// The elements of a row of F32, F16 or BF16 activations.
#[inline(always)]
pub fn floats(n: usize, row: &[u8]) -> &[F32] {
    prefix(row, n).0
}

#[inline(always)]
fn prefix<T: FromBytes + Immutable + KnownLayout + Unaligned>(
    bytes: &[u8],
    n: usize,
) -> (&[T], &[u8]) {
    <[T]>::ref_from_prefix_with_elems(bytes, n).expect("the row has at least `n` elements")
}

/// The elements in a section of bytes.
pub fn elements_mut<T: FromBytes + zerocopy::IntoBytes + KnownLayout + Unaligned>(
    bytes: &mut [u8],
) -> &mut [T] {
    <[T]>::mut_from_bytes(bytes).expect("the size of a section is a multiple of its element size")
}

fn round_each(row: &[f32], out: &mut [u8], round: impl Fn(f32) -> f32) {
    let (out, _) = out.as_chunks_mut::<4>();
    for (value, out) in row.iter().zip(out) {
        *out = round(*value).to_le_bytes();
    }
}

fn round_to_f16(value: f32) -> f32 {
    half::f16::from_f32(value).to_f32()
}

fn round_to_bf16(value: f32) -> f32 {
    let bits = value.to_bits();
    if value.is_nan() {
        return f32::from_bits((bits | 0x0040_0000) & 0xffff_0000);
    }
    f32::from_bits((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff_0000)
}

/// Adding this constant (1.5 · 2^23) to a number below 2^22 rounds it to the nearest integer, ties to even, and puts that
/// integer in the low bits.
const ROUND: f32 = 12_582_912.0;

fn round_to_i8(value: f32) -> i8 {
    (value + ROUND).to_bits() as i8
}

/// The bits of the largest magnitude. The bits of a NaN are larger than those of numbers.
fn max_magnitude(values: &[f32]) -> u32 {
    values.iter().fold(0, |max, v| max.max(magnitude(*v)))
}

fn magnitude(value: f32) -> u32 {
    value.to_bits() & 0x7fff_ffff
}

/// The scale of a Q8_0 block, not rounded to half precision, and its codes.
pub(crate) fn quantize_q8_0_block(values: &[f32; 32]) -> (f32, [i8; 32]) {
    let amax = f32::from_bits(max_magnitude(values));
    let inverse = if amax != 0.0 { 127.0 / amax } else { 0.0 };
    (
        amax / 127.0,
        values.map(|value| round_to_i8(value * inverse)),
    )
}

fn quantize_q8_0(ty: ActivationType, row: &[f32], out: &mut [u8]) {
    let mut out = Q8RowMut::new(ty, row.len(), out);
    let (blocks, _) = row.as_chunks::<32>();
    let (codes, _) = out.q.as_chunks_mut::<32>();
    for (i, values) in blocks.iter().enumerate() {
        let scale;
        (scale, codes[i]) = quantize_q8_0_block(values);
        out.scale[i].set(round_to_f16(scale));
        if ty == ActivationType::Q8_1 {
            let sum: i32 = codes[i].iter().map(|&q| i32::from(q)).sum();
            out.scaled_sum[i].set(round_to_f16(scale * sum as f32));
        }
    }
    out.fill_sums();
}

/// Q8_K. The first element with the largest magnitude gets the code -127 for either sign, so the scale may be negative.
fn quantize_q8_k(row: &[f32], out: &mut [u8]) {
    let mut out = Q8RowMut::new(ActivationType::Q8K, row.len(), out);
    let (blocks, _) = row.as_chunks::<QK_K>();
    let (codes, _) = out.q.as_chunks_mut::<QK_K>();
    for (i, values) in blocks.iter().enumerate() {
        let max = max_magnitude(values);
        let peak = values
            .iter()
            .find(|v| magnitude(**v) == max)
            .copied()
            .unwrap_or(0.0);
        if peak == 0.0 {
            codes[i].fill(0);
            out.scale[i].set(0.0);
            continue;
        }
        let inverse = -127.0 / peak;
        codes[i] = values.map(|value| round_to_i8(value * inverse));
        out.scale[i].set(1.0 / inverse);
    }
    out.fill_sums();
}
