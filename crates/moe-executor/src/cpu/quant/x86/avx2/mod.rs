//! Kernels for AVX2 with FMA and F16C.
//!
//! Four rows of weights are multiplied at a time: they share the loads of activations, and their sums are independent.

mod chunks;
mod decoded;
mod float;
mod gemm;
mod gemm_float;
mod k_quants;
mod quantize;
mod transpose;

use std::arch::x86_64::*;

pub use float::gemv_float;
pub use gemm::gemm;
pub use gemm_float::gemm_float;
pub use quantize::quantize;

use crate::cpu::quant::activation::Q8Row;
use crate::cpu::quant::format::{F16, Format, QK_K};
use crate::cpu::quant::portable;
use crate::cpu::quant::x86::prefetch;

/// A format with a vectorized product of one block.
pub trait Steps: Format {
    /// The activations of a block.
    type Activations<'a>: Copy;

    /// Loads the activations of a block.
    ///
    /// # Safety
    /// The CPU has the instructions of this module, and `act` has all elements of block `block`.
    unsafe fn load<'a>(act: &Q8Row<'a>, block: usize) -> Self::Activations<'a>;

    /// Adds the products of a block to the partial sums `acc`.
    ///
    /// # Safety
    /// The CPU has the instructions of this module, and `act` is a result of [`Steps::load`].
    unsafe fn step(block: &Self, act: &Self::Activations<'_>, acc: __m256) -> __m256;

    /// Decodes the codes: [`Format::decode_codes`].
    ///
    /// # Safety
    /// The CPU has the instructions of this module.
    unsafe fn decode(&self, q: &mut [i8; QK_K]);
}

/// `out[r] = row r · act` for rows of `n` elements and `row_size` bytes.
#[target_feature(enable = "avx2,fma,f16c")]
pub fn gemv<F: Steps>(rows: &[u8], row_size: usize, n: usize, act: &[u8], out: &mut [f32]) {
    let act = Q8Row::new(F::ACTIVATION, n, act);
    let (tiles, rest) = out.as_chunks_mut::<4>();
    let (tile_rows, rest_rows) = rows.split_at(tiles.len() * 4 * row_size);
    for (tile, rows) in tiles.iter_mut().zip(tile_rows.chunks_exact(4 * row_size)) {
        *tile = dot::<F, 4>(rows, row_size, n, &act);
    }
    for (out, row) in rest.iter_mut().zip(rest_rows.chunks_exact(row_size)) {
        [*out] = dot::<F, 1>(row, row_size, n, &act);
    }
}

/// The inner products of `R` rows with the activations.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn dot<F: Steps, const R: usize>(rows: &[u8], row_size: usize, n: usize, act: &Q8Row) -> [f32; R] {
    let n_blocks = n / F::BLOCK;
    let mut row = [&[] as &[F]; R];
    for r in 0..R {
        row[r] = &portable::blocks(&rows[r * row_size..][..row_size])[..n_blocks];
    }
    let mut acc = [_mm256_setzero_ps(); R];
    for block in 0..n_blocks {
        // SAFETY: the target features of this function are those of the module, and the activations have `n` elements, which
        // are at least `n_blocks` blocks.
        unsafe {
            let values = F::load(act, block);
            for r in 0..R {
                prefetch(&raw const row[r][block], 1, R * row_size);
                acc[r] = F::step(&row[r][block], &values, acc[r]);
            }
        }
    }
    let mut out = [0.0; R];
    for r in 0..R {
        out[r] = sum_lanes(acc[r]);
    }
    out
}

/// The sum of all lanes.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn sum_lanes(v: __m256) -> f32 {
    let v = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
    let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
    _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)))
}

/// Converts a half-precision number to f32.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn widen(d: F16) -> f32 {
    _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(d.bits()))))
}

/// Loads 32 bytes.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn load_32<T>(bytes: &[T; 32]) -> __m256i {
    const { assert!(size_of::<T>() == 1) };
    // SAFETY: the array has 32 bytes.
    unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
}

/// Loads 16 bytes.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn load_16<T>(bytes: &[T; 16]) -> __m128i {
    const { assert!(size_of::<T>() == 1) };
    // SAFETY: the array has 16 bytes.
    unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) }
}
