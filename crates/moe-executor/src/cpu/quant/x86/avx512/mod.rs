//! Kernels for AVX-512 F, BW, DQ, VL and VNNI.
//!
//! Four rows of weights are multiplied at a time: they share the loads of activations, and their sums are independent.

mod chunks;
mod decoded;
mod float;
mod gemm;
mod gemm_float;
mod k_quants;
mod transpose;

use std::arch::x86_64::*;

pub use float::gemv_float;
pub use gemm::gemm;
pub use gemm_float::{gemm_bf16, gemm_float};

use crate::cpu::quant::activation::Q8Row;
use crate::cpu::quant::format::Format;
use crate::cpu::quant::portable;
use crate::cpu::quant::x86::prefetch;

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

/// `out[r] = row r · act` for rows of `n` elements and `row_size` bytes.
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
pub fn gemv<F: Steps>(rows: &[u8], row_size: usize, n: usize, act: &[u8], out: &mut [f32]) {
    let act = Q8Row::new(F::ACTIVATION, n, act);
    let (tiles, rest) = out.as_chunks_mut::<4>();
    let (tile_rows, rest_rows) = rows.split_at(tiles.len() * 4 * row_size);
    for (tile, rows) in tiles.iter_mut().zip(tile_rows.chunks_exact(4 * row_size)) {
        *tile = dot::<F, 4>(rows, row_size, &act);
    }
    for (out, row) in rest.iter_mut().zip(rest_rows.chunks_exact(row_size)) {
        [*out] = dot::<F, 1>(row, row_size, &act);
    }
}

/// The inner products of `R` rows with the activations.
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
fn dot<F: Steps, const R: usize>(rows: &[u8], row_size: usize, act: &Q8Row) -> [f32; R] {
    let mut row = [&[] as &[F]; R];
    for r in 0..R {
        row[r] = portable::blocks(&rows[r * row_size..][..row_size]);
    }
    let blocks_per_step = F::STEP / F::BLOCK;
    let n_steps = row[0].len() / blocks_per_step;
    let mut acc = [_mm512_setzero_ps(); R];
    for step in 0..n_steps {
        // SAFETY: the target features of this function are those of the module, and all rows and the activations have
        // `n_steps` complete steps.
        unsafe {
            let values = F::load(act, step);
            for r in 0..R {
                prefetch::<F>(
                    row[r].as_ptr().add(step * blocks_per_step),
                    blocks_per_step,
                    R * row_size,
                );
                acc[r] = F::step(row[r].as_ptr().add(step * blocks_per_step), &values, acc[r]);
            }
        }
    }
    let mut out = [0.0; R];
    for r in 0..R {
        out[r] = _mm512_reduce_add_ps(acc[r]);
        let done = n_steps * blocks_per_step;
        if done < row[r].len() {
            out[r] += portable::dot(&row[r][done..], &act.starting_at(n_steps * F::STEP));
        }
    }
    out
}
