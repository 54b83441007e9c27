//! Kernels for AVX2 with FMA and F16C.
//!
//! Products of a few tokens multiply several rows of weights at a time: they share the loads of activations, and their sums
//! are independent.

mod chunks;
mod decoded;
mod float;
mod gemm;
mod gemm_float;
mod k_quants;
mod quantize;
mod transpose;

use std::arch::x86_64::*;

pub use float::stream_float;
pub use gemm::gemm;
pub use gemm_float::gemm_float;
pub use quantize::quantize;

use crate::cpu::prefetch::prefetch;
use crate::cpu::quant::activation::Q8Row;
use crate::cpu::quant::format::{F16, Format, QK_K};
use crate::cpu::quant::portable::{activations, blocks};

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

define_stream!(stream: Steps, "avx2,fma,f16c", activations, blocks);

/// The inner products of `R` rows with the activations of `T` tokens.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn dot<F: Steps, const R: usize, const T: usize>(
    rows: [&[F]; R],
    act: &[Q8Row; T],
) -> [[f32; T]; R] {
    // Equal lengths, so that the compiler removes the bounds checks.
    let n_blocks = rows[0].len();
    let rows = rows.map(|row| &row[..n_blocks]);
    let mut acc = [[_mm256_setzero_ps(); T]; R];
    for block in 0..n_blocks {
        for r in 0..R {
            prefetch::<R, F>(&rows[r][block], 1);
        }
        for t in 0..T {
            // SAFETY: the target features of this function are those of the module, and the activations have all elements of
            // a row.
            unsafe {
                let values = F::load(&act[t], block);
                for r in 0..R {
                    acc[r][t] = F::step(&rows[r][block], &values, acc[r][t]);
                }
            }
        }
    }
    acc.map(|acc| acc.map(|acc| sum_lanes(acc)))
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
