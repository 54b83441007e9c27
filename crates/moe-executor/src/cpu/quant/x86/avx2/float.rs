//! Products of floating-point weights with a few rows of activations.

use std::arch::x86_64::*;

use zerocopy::byteorder::little_endian::F32;

use super::sum_lanes;
use crate::cpu::prefetch::prefetch;
use crate::cpu::quant::float::{Bf16, FloatFormat};
use crate::cpu::quant::format::F16;
use crate::cpu::quant::portable::float_activations;

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

define_stream!(stream_float: Widen, "avx2,fma,f16c", float_activations, F::elements);

/// The inner products of `R` rows with the activations of `T` tokens.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn dot<F: Widen, const R: usize, const T: usize>(
    rows: [&[F]; R],
    act: &[&[F32]; T],
) -> [[f32; T]; R] {
    let n = rows[0].len();
    let (rows, act) = (rows.map(|row| &row[..n]), act.map(|act| &act[..n]));
    // Two partial sums per product hide the latency of additions.
    let mut acc = [[[_mm256_setzero_ps(); 2]; T]; R];
    let vectorized = n / 16 * 16;
    for at in (0..vectorized).step_by(16) {
        for r in 0..R {
            prefetch::<R, F>(&rows[r][at], 16);
        }
        for part in 0..2 {
            let at = at + part * 8;
            for t in 0..T {
                // SAFETY: elements `at..at + 8` exist in each row and in the activations, which have `n` elements; the CPU has
                // the target features of this function.
                unsafe {
                    let values = F32::widen(act[t].as_ptr().add(at));
                    for r in 0..R {
                        let weights = F::widen(rows[r].as_ptr().add(at));
                        acc[r][t][part] = _mm256_fmadd_ps(weights, values, acc[r][t][part]);
                    }
                }
            }
        }
    }
    let mut out = acc.map(|acc| acc.map(|[a, b]| sum_lanes(_mm256_add_ps(a, b))));
    for r in 0..R {
        for t in 0..T {
            for (weight, value) in rows[r][vectorized..].iter().zip(&act[t][vectorized..]) {
                out[r][t] += weight.to_f32() * value.get();
            }
        }
    }
    out
}
