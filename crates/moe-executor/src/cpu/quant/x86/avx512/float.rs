//! Matrix-vector products of floating-point weights.

use std::arch::x86_64::*;

use zerocopy::byteorder::little_endian::F32;

use crate::cpu::quant::activation::floats;
use crate::cpu::quant::float::{Bf16, FloatFormat};
use crate::cpu::quant::format::F16;
use crate::cpu::quant::x86::prefetch;

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

/// `out[r] = row r · act` for rows of `n` elements and `row_size` bytes.
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
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
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
fn dot<F: Widen, const R: usize>(rows: &[u8], row_size: usize, act: &[F32]) -> [f32; R] {
    let mut row = [&[] as &[F]; R];
    for r in 0..R {
        row[r] = F::elements(&rows[r * row_size..][..row_size]);
        assert_eq!(row[r].len(), act.len());
    }
    // Two partial sums per row hide the latency of additions.
    let mut acc = [[_mm512_setzero_ps(); 2]; R];
    let unmasked = act.len() / 32 * 32;
    for at in (0..unmasked).step_by(32) {
        for r in 0..R {
            prefetch(row[r].as_ptr().wrapping_add(at), 32, R * row_size);
        }
        for part in 0..2 {
            // SAFETY: elements `at..at + 32` exist in each row and in the activations, by the assertion above; the CPU has the
            // target features of this function.
            unsafe {
                let values = F32::widen(act.as_ptr().add(at + part * 16), !0);
                for r in 0..R {
                    let weights = F::widen(row[r].as_ptr().add(at + part * 16), !0);
                    acc[r][part] = _mm512_fmadd_ps(weights, values, acc[r][part]);
                }
            }
        }
    }
    for at in (unmasked..act.len()).step_by(16) {
        let mask = !0u16 >> (16 - (act.len() - at).min(16));
        // SAFETY: the mask selects only elements before the end.
        unsafe {
            let values = F32::widen(act.as_ptr().add(at), mask);
            for r in 0..R {
                let weights = F::widen(row[r].as_ptr().add(at), mask);
                acc[r][0] = _mm512_fmadd_ps(weights, values, acc[r][0]);
            }
        }
    }
    let mut out = [0.0; R];
    for r in 0..R {
        out[r] = _mm512_reduce_add_ps(_mm512_add_ps(acc[r][0], acc[r][1]));
    }
    out
}
