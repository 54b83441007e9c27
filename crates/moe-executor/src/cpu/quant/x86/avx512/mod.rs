//! Kernels for AVX-512 F, BW, DQ, VL and VNNI.
//!
//! Products of a few tokens multiply several rows of weights at a time: they share the loads of activations, and their sums
//! are independent.

mod chunks;
mod decoded;
mod float;
mod gemm;
mod gemm_float;
mod k_quants;
mod transpose;

use std::arch::x86_64::*;

pub use float::stream_float;
pub use gemm::gemm;
pub use gemm_float::{gemm_bf16, gemm_float};

use crate::cpu::prefetch::prefetch;
use crate::cpu::quant::activation::Q8Row;
use crate::cpu::quant::format::Format;
use crate::cpu::quant::portable::{self, activations, blocks};

/// A format with a vectorized product of one step, which is one or several blocks.
pub trait Steps: Format {
    /// Elements of a step, a multiple of [`Format::BLOCK`].
    const STEP: usize;
    /// The activations of a step in registers.
    type Activations<'a>: Copy;

    /// Loads the activations of a step.
    ///
    /// # Safety
    /// The CPU has the instructions of this module, and `act` has all elements of step `step`.
    unsafe fn load<'a>(act: &Q8Row<'a>, step: usize) -> Self::Activations<'a>;

    /// Adds the products of a step to the partial sums `acc`.
    ///
    /// # Safety
    /// The CPU has the instructions of this module, and the blocks of a complete step can be read from `blocks` on.
    unsafe fn step(blocks: *const Self, act: &Self::Activations<'_>, acc: __m512) -> __m512;

    /// Writes the codes of a step: [`Format::decode_codes`].
    ///
    /// # Safety
    /// The CPU has the instructions of this module, the blocks of a complete step can be read from `blocks` on, and
    /// [`Steps::STEP`] bytes can be written to `q`.
    unsafe fn decode(blocks: *const Self, q: *mut i8);

    /// Writes the scales and, if [`Format::MIN`] is true, the minima of one block of sixteen rows. Group `i` of row `r` is
    /// lane `r` of `scale[2 * i]` and `min[2 * i]`.
    ///
    /// # Safety
    /// The CPU has the instructions of this module, and `scale` and `min` can be written for all groups of a block.
    unsafe fn decode_scales_of_16(blocks: [&Self; 16], scale: *mut __m512, min: *mut __m512);
}

define_stream!(stream: Steps, "avx512bw,avx512dq,avx512vl,avx512vnni", activations, blocks);

/// The inner products of `R` rows with the activations of `T` tokens.
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
fn dot<F: Steps, const R: usize, const T: usize>(
    rows: [&[F]; R],
    act: &[Q8Row; T],
) -> [[f32; T]; R] {
    let blocks_per_step = F::STEP / F::BLOCK;
    let n_blocks = rows[0].len();
    let rows = rows.map(|row| &row[..n_blocks]);
    let n_steps = n_blocks / blocks_per_step;
    let mut acc = [[_mm512_setzero_ps(); T]; R];
    for step in 0..n_steps {
        let at = step * blocks_per_step;
        for r in 0..R {
            prefetch::<R, F>(&rows[r][at], blocks_per_step);
        }
        for t in 0..T {
            // SAFETY: the target features of this function are those of the module, and all rows and the activations have
            // `n_steps` complete steps.
            unsafe {
                let values = F::load(&act[t], step);
                for r in 0..R {
                    acc[r][t] = F::step(rows[r].as_ptr().add(at), &values, acc[r][t]);
                }
            }
        }
    }
    let mut out = acc.map(|acc| acc.map(|acc| _mm512_reduce_add_ps(acc)));
    for r in 0..R {
        let rest = &rows[r][n_steps * blocks_per_step..];
        if !rest.is_empty() {
            for t in 0..T {
                out[r][t] += portable::dot(rest, &act[t].starting_at(n_steps * F::STEP));
            }
        }
    }
    out
}
