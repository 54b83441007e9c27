//! Products of floating-point weights with a few rows of activations.

use std::arch::x86_64::*;

use zerocopy::byteorder::little_endian::F32;

use crate::cpu::prefetch::prefetch;
use crate::cpu::quant::float::{Bf16, FloatFormat};
use crate::cpu::quant::format::F16;
use crate::cpu::quant::portable::float_activations;

/// A floating-point format with a vectorized conversion of sixteen elements to f32.
pub trait Widen: FloatFormat {
    /// Converts the elements at `at` that `mask` selects; the other lanes are 0.
    ///
    /// # Safety
    /// The CPU has AVX-512 F, BW and VL, and the selected elements can be read.
    unsafe fn widen(at: *const Self, mask: __mmask16) -> __m512;
}

impl Widen for F32 {
    #[target_feature(enable = "avx512bw,avx512vl")]
    #[inline]
    unsafe fn widen(at: *const F32, mask: __mmask16) -> __m512 {
        // SAFETY: by the contract of this function.
        unsafe { _mm512_maskz_loadu_ps(mask, at.cast()) }
    }
}

impl Widen for F16 {
    #[target_feature(enable = "avx512bw,avx512vl")]
    #[inline]
    unsafe fn widen(at: *const F16, mask: __mmask16) -> __m512 {
        // SAFETY: by the contract of this function.
        unsafe { _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, at.cast())) }
    }
}

impl Widen for Bf16 {
    #[target_feature(enable = "avx512bw,avx512vl")]
    #[inline]
    unsafe fn widen(at: *const Bf16, mask: __mmask16) -> __m512 {
        // SAFETY: by the contract of this function.
        let upper = unsafe { _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, at.cast())) };
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(upper))
    }
}

define_stream!(stream_float: Widen, "avx512bw,avx512dq,avx512vl,avx512vnni", float_activations, F::elements);

/// The inner products of `R` rows with the activations of `T` tokens.
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
fn dot<F: Widen, const R: usize, const T: usize>(
    rows: [&[F]; R],
    act: &[&[F32]; T],
) -> [[f32; T]; R] {
    let n = rows[0].len();
    let (rows, act) = (rows.map(|row| &row[..n]), act.map(|act| &act[..n]));
    // Two partial sums per product hide the latency of additions.
    let mut acc = [[[_mm512_setzero_ps(); 2]; T]; R];
    let mut add = |at: usize, part: usize, mask: __mmask16| {
        for t in 0..T {
            // SAFETY: the elements from `at` on that `mask` selects exist in each row and in the activations, which
            // have `n` elements; the CPU has the target features of this function.
            unsafe {
                let values = F32::widen(act[t].as_ptr().add(at), mask);
                for r in 0..R {
                    let weights = F::widen(rows[r].as_ptr().add(at), mask);
                    acc[r][t][part] = _mm512_fmadd_ps(weights, values, acc[r][t][part]);
                }
            }
        }
    };
    let unmasked = n / 32 * 32;
    for at in (0..unmasked).step_by(32) {
        for r in 0..R {
            prefetch::<R, F>(&rows[r][at], 32);
        }
        add(at, 0, !0);
        add(at + 16, 1, !0);
    }
    for at in (unmasked..n).step_by(16) {
        add(at, 0, !0u16 >> (16 - (n - at).min(16)));
    }
    acc.map(|acc| acc.map(|[a, b]| _mm512_reduce_add_ps(_mm512_add_ps(a, b))))
}
