//! Matrix-vector products of floating-point weights.

use std::arch::x86_64::*;

use zerocopy::byteorder::little_endian::F32;

use super::sum_lanes;
use crate::cpu::quant::activation::floats;
use crate::cpu::quant::float::{Bf16, FloatFormat};
use crate::cpu::quant::format::F16;
use crate::cpu::quant::x86::prefetch;

/// A floating-point format with a vectorized conversion of eight elements to f32.
pub trait Widen: FloatFormat {
    /// Converts the eight elements at `at`.
    ///
    /// # Safety
    /// The CPU has AVX2 and F16C, and the elements can be read.
    unsafe fn widen(at: *const Self) -> __m256;
}

impl Widen for F32 {
    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    unsafe fn widen(at: *const F32) -> __m256 {
        // SAFETY: by the contract of this function.
        unsafe { _mm256_loadu_ps(at.cast()) }
    }
}

impl Widen for F16 {
    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    unsafe fn widen(at: *const F16) -> __m256 {
        // SAFETY: by the contract of this function.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(at.cast())) }
    }
}

impl Widen for Bf16 {
    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    unsafe fn widen(at: *const Bf16) -> __m256 {
        // SAFETY: by the contract of this function.
        let upper = unsafe { _mm256_cvtepu16_epi32(_mm_loadu_si128(at.cast())) };
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(upper))
    }
}

/// `out[r] = row r · act` for rows of `n` elements and `row_size` bytes.
#[target_feature(enable = "avx2,fma,f16c")]
pub fn gemv_float<F: Widen>(rows: &[u8], row_size: usize, n: usize, act: &[u8], out: &mut [f32]) {
    let act = floats(n, act);
    let (tiles, rest) = out.as_chunks_mut::<4>();
    let (tile_rows, rest_rows) = rows.split_at(tiles.len() * 4 * row_size);
    for (tile, rows) in tiles.iter_mut().zip(tile_rows.chunks_exact(4 * row_size)) {
        *tile = dot::<F, 4>(rows, row_size, act);
    }
    for (out, row) in rest.iter_mut().zip(rest_rows.chunks_exact(row_size)) {
        [*out] = dot::<F, 1>(row, row_size, act);
    }
}

/// The inner products of `R` rows with the activations.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn dot<F: Widen, const R: usize>(rows: &[u8], row_size: usize, act: &[F32]) -> [f32; R] {
    let mut row = [&[] as &[F]; R];
    for r in 0..R {
        row[r] = F::elements(&rows[r * row_size..][..row_size]);
        assert_eq!(row[r].len(), act.len());
    }
    // Two partial sums per row hide the latency of additions.
    let mut acc = [[_mm256_setzero_ps(); 2]; R];
    let vectorized = act.len() / 16 * 16;
    for at in (0..vectorized).step_by(16) {
        for r in 0..R {
            prefetch(row[r].as_ptr().wrapping_add(at), 16, R * row_size);
        }
        for part in 0..2 {
            // SAFETY: elements `at..at + 16` exist in each row and in the activations, by the assertion above; the CPU has the
            // target features of this function.
            unsafe {
                let values = F32::widen(act.as_ptr().add(at + part * 8));
                for r in 0..R {
                    let weights = F::widen(row[r].as_ptr().add(at + part * 8));
                    acc[r][part] = _mm256_fmadd_ps(weights, values, acc[r][part]);
                }
            }
        }
    }
    let mut out = [0.0; R];
    for r in 0..R {
        out[r] = sum_lanes(_mm256_add_ps(acc[r][0], acc[r][1]));
        for (weight, value) in row[r][vectorized..].iter().zip(&act[vectorized..]) {
            out[r] += weight.to_f32() * value.get();
        }
    }
    out
}
