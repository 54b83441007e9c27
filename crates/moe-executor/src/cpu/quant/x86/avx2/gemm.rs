//! Products of quantized weights with several rows of activations.
//!
//! A panel has 16 rows, one per lane of two vectors. A lane has two elements of 16 bits; the next two elements are in the next
//! two vectors. Activations are broadcast to all lanes, two at a time.

use std::arch::x86_64::*;

use super::Steps;
use super::transpose::transpose;
use crate::cpu::quant::activation::{Q8Row, act_block, sum_groups};
use crate::cpu::quant::format::{Format, QK_K};
use crate::cpu::quant::gemm::{Product, Put, Scratch, reserve};
use crate::cpu::quant::portable::blocks;

/// Rows per panel.
const ROWS: usize = 16;
/// Maximum elements of a row in a panel; a multiple of every block.
const DEPTH: usize = 1024;
/// Rows of activations that are multiplied with a panel at a time.
const TOKENS: usize = 4;

/// Addresses of the parts of a panel. The vectors of a group of elements are contiguous.
struct Panel {
    /// `[group][GROUP / 2][2]`, each 8 rows of 2 elements.
    weights: *mut __m256i,
    /// `[group][2]`
    scale: *mut __m256,
    /// `[group][2]`
    min: *mut __m256,
}

/// Computes all products `row r · act(t)` and passes them to `put(t, r, products)`.
#[target_feature(enable = "avx2,fma,f16c")]
pub fn gemm<F: Steps>(product: &Product, scratch: &mut Scratch, put: &mut Put) {
    let panel = Panel {
        weights: reserve(&mut scratch.weights, DEPTH * ROWS * 2),
        scale: reserve(&mut scratch.scale, DEPTH / F::GROUP * ROWS * 4),
        min: reserve(&mut scratch.min, DEPTH / F::GROUP * ROWS * 4),
    };
    let act: *mut i16 = reserve(&mut scratch.act, TOKENS * DEPTH * 2);
    let n_tokens = product.n_tokens;
    let sums: *mut __m256 = reserve(&mut scratch.sums, n_tokens * ROWS * 4);
    for first_row in (0..product.n_rows()).step_by(ROWS) {
        let n_rows = ROWS.min(product.n_rows() - first_row);
        for start in (0..product.n).step_by(DEPTH) {
            let depth = DEPTH.min(product.n - start);
            // SAFETY: the panel is allocated for `DEPTH` elements of `ROWS` rows, `act` for `TOKENS` rows of `DEPTH` elements,
            // and `sums` for all tokens.
            unsafe {
                for half in 0..2 {
                    pack::<F>(product, first_row + half * 8, start, depth, half, &panel);
                }
                for token in (0..n_tokens).step_by(TOKENS) {
                    let sums = sums.add(token * 2);
                    match n_tokens - token {
                        1 => tile::<F, 1>(product, token, start, depth, &panel, act, sums),
                        2 => tile::<F, 2>(product, token, start, depth, &panel, act, sums),
                        3 => tile::<F, 3>(product, token, start, depth, &panel, act, sums),
                        _ => tile::<F, TOKENS>(product, token, start, depth, &panel, act, sums),
                    }
                }
            }
        }
        for token in 0..n_tokens {
            // SAFETY: `sums` has `ROWS` floats per token, which were written above.
            put(token, first_row, unsafe {
                std::slice::from_raw_parts(sums.add(token * 2).cast(), n_rows)
            });
        }
    }
}

/// Decodes elements `start..start + depth` of eight rows into one half of the panel. Rows beyond the last are copies of the
/// last; their sums are not used.
///
/// # Safety
/// The CPU has the instructions of this module, and the panel is allocated for `depth` elements.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn pack<F: Steps>(
    product: &Product,
    first_row: usize,
    start: usize,
    depth: usize,
    half: usize,
    panel: &Panel,
) {
    let last = product.n_rows() - 1;
    let mut q = [[0i8; QK_K]; 8];
    let (mut scales, mut mins) = ([0.0; QK_K / 16], [0.0; QK_K / 16]);
    let mut row = [&[] as &[F]; 8];
    for r in 0..8 {
        let at = (first_row + r).min(last) * product.row_size;
        row[r] = &blocks(&product.rows[at..][..product.row_size])[start / F::BLOCK..]
            [..depth / F::BLOCK];
    }
    for b in 0..depth / F::BLOCK {
        for r in 0..8 {
            // SAFETY: the target features of this function are those of `Steps`.
            unsafe { row[r][b].decode(&mut q[r]) };
            row[r][b].decode_scales(&mut scales, &mut mins);
            for i in 0..F::BLOCK / F::GROUP {
                let at = (b * (F::BLOCK / F::GROUP) + i) * 2 + half;
                // SAFETY: the panel is allocated for `depth` elements, by the contract of this function.
                unsafe {
                    panel.scale.add(at).cast::<f32>().add(r).write(scales[i]);
                    panel.min.add(at).cast::<f32>().add(r).write(mins[i]);
                }
            }
        }
        for first in (0..F::BLOCK).step_by(16) {
            let mut v = [_mm256_setzero_si256(); 8];
            for r in 0..8 {
                // SAFETY: the slice has 16 bytes.
                v[r] = unsafe {
                    _mm256_cvtepi8_epi16(_mm_loadu_si128(q[r][first..][..16].as_ptr().cast()))
                };
            }
            for (i, vector) in transpose(v).into_iter().enumerate() {
                let at = (b * F::BLOCK + first) / 2 + i;
                // SAFETY: the panel is allocated for `depth` elements, by the contract of this function.
                unsafe { panel.weights.add(at * 2 + half).write(vector) }
            }
        }
    }
}

/// Adds the products of the panel and `T` tokens to `sums[t][2]`; overwrites the sums at the start of a row.
///
/// # Safety
/// The CPU has the instructions of this module. The panel has the elements `start..start + depth` and `sums` has `T` tokens.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn tile<F: Format, const T: usize>(
    product: &Product,
    token: usize,
    start: usize,
    depth: usize,
    panel: &Panel,
    act: *mut i16,
    sums: *mut __m256,
) {
    let mut rows = [Q8Row::EMPTY; T];
    let mut scaled_sums = [[0.0f32; DEPTH / 16]; T];
    for t in 0..T {
        rows[t] = Q8Row::new(F::ACTIVATION, product.n, (product.act)(token + t)).starting_at(start);
        // SAFETY: `act` is allocated for `TOKENS >= T` rows of `DEPTH >= depth` elements.
        let target = unsafe { std::slice::from_raw_parts_mut(act.add(t * DEPTH), depth) };
        for (target, &source) in target.iter_mut().zip(rows[t].q) {
            *target = i16::from(source);
        }
        if F::MIN {
            sum_groups::<F>(&rows[t], &mut scaled_sums[t][..depth / F::GROUP]);
        }
    }
    // SAFETY: the panel and the activations have `depth` elements, and `sums` has `T` tokens, by the contract of this function.
    unsafe {
        let mut acc = [[_mm256_setzero_ps(); 2]; T];
        if start > 0 {
            for t in 0..T {
                acc[t] = [*sums.add(t * 2), *sums.add(t * 2 + 1)];
            }
        }
        for group in 0..depth / F::GROUP {
            let mut sum = [[_mm256_setzero_si256(); 2]; T];
            for i in 0..F::GROUP / 2 {
                let at = group * (F::GROUP / 2) + i;
                let weights = [*panel.weights.add(at * 2), *panel.weights.add(at * 2 + 1)];
                for t in 0..T {
                    let values =
                        _mm256_set1_epi32(act.add(t * DEPTH + at * 2).cast::<i32>().read());
                    sum[t][0] = _mm256_add_epi32(sum[t][0], _mm256_madd_epi16(weights[0], values));
                    sum[t][1] = _mm256_add_epi32(sum[t][1], _mm256_madd_epi16(weights[1], values));
                }
            }
            for half in 0..2 {
                let scale = *panel.scale.add(group * 2 + half);
                for t in 0..T {
                    let act_scale = rows[t]
                        .scale
                        .get_unchecked(group * F::GROUP / act_block::<F>())
                        .get();
                    let scale = _mm256_mul_ps(scale, _mm256_set1_ps(act_scale));
                    acc[t][half] =
                        _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[t][half]), scale, acc[t][half]);
                }
                if F::MIN {
                    let min = *panel.min.add(group * 2 + half);
                    for t in 0..T {
                        let sum = _mm256_set1_ps(*scaled_sums[t].get_unchecked(group));
                        acc[t][half] = _mm256_fnmadd_ps(min, sum, acc[t][half]);
                    }
                }
            }
        }
        for t in 0..T {
            *sums.add(t * 2) = acc[t][0];
            *sums.add(t * 2 + 1) = acc[t][1];
        }
    }
}
