//! Kernels for AVX-512 F, BW, DQ, VL and VNNI.
//!
//! Rows are taken four at a time: they share the loads of the activations, and their sums do not wait for one another.

mod chunks;
mod decoded;
mod float;
mod gemm;
mod gemm_float;
mod super_blocks;
mod transpose;

use std::arch::x86_64::*;

pub use float::gemv_float;
pub use gemm::gemm;
pub use gemm_float::{gemm_bf16, gemm_float};

use crate::cpu::quant::activation::Q8Row;
use crate::cpu::quant::format::Format;
use crate::cpu::quant::portable;
use crate::cpu::quant::x86::prefetch;

/// A format whose product is taken in steps of a few vectors.
pub trait Steps: Format {
    /// Elements of a step, a multiple of [`Format::BLOCK`].
    const STEP: usize;
    /// The activations of a step in registers.
    type Activations<'a>: Copy;

    /// Loads the activations of a step.
    ///
    /// # Safety
    /// The processor has the instructions of this module, and `act` has all elements of step `step`.
    unsafe fn load<'a>(act: &Q8Row<'a>, step: usize) -> Self::Activations<'a>;

    /// Adds the products of a step to the partial sums `acc`.
    ///
    /// # Safety
    /// The processor has the instructions of this module, and the blocks of a whole step follow `blocks`.
    unsafe fn step(blocks: *const Self, act: &Self::Activations<'_>, acc: __m512) -> __m512;

    /// Writes the codes of a step, `q` of [`Format`].
    ///
    /// # Safety
    /// The processor has the instructions of this module, the blocks of a whole step follow `blocks`, and `q` has room.
    unsafe fn decode(blocks: *const Self, q: *mut i8);

    /// Writes the scales and, if [`Format::MIN`], the minima of one block of sixteen rows: those of group `i` of row `r`
    /// to lane `r` of `scale[2 * i]` and `min[2 * i]`.
    ///
    /// # Safety
    /// The processor has the instructions of this module, and `scale` and `min` have room.
    unsafe fn decode_scales_of_16(blocks: [&Self; 16], scale: *mut __m512, min: *mut __m512);
}

/// `out[r] = row r · act`.
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
        // SAFETY: all rows and the activations have `n_steps` whole steps.
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
