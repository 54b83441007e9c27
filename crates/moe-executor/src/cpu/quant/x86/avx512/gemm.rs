//! Products of quantized weights with several rows of activations.
//!
//! A panel has 32 rows, one per lane of two vectors. A lane has four elements; the next four elements are in the next two
//! vectors. Activations are broadcast to all lanes, four at a time. VNNI multiplies unsigned with signed bytes, so 128 is added
//! to the activations, and the sums start at minus 128 times the weights to compensate.

use std::arch::x86_64::*;

use super::Steps;
use super::transpose::transpose;
use crate::cpu::quant::activation::{Q8Row, act_block, sum_groups};
use crate::cpu::quant::format::{Format, QK_K};
use crate::cpu::quant::gemm::{Product, Put, Scratch, reserve};
use crate::cpu::quant::portable::blocks;

/// Rows per panel.
const ROWS: usize = 32;
/// Maximum elements of a row in a panel; a multiple of every block.
const DEPTH: usize = 2048;
/// Rows of activations that are multiplied with a panel at a time.
const TOKENS: usize = 6;

/// Addresses of the parts of a panel. The vectors of a group of elements are contiguous.
struct Panel {
    /// `[group][GROUP / 4][2]`, each 16 rows of 4 elements.
    weights: *mut __m512i,
    /// `[group][2]`
    start: *mut __m512i,
    /// `[group][2]`
    scale: *mut __m512,
    /// `[group][2]`
    min: *mut __m512,
}

/// Computes all products `row r · act(t)` and passes them to `put(t, r, products)`.
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
pub fn gemm<F: Steps>(product: &Product, scratch: &mut Scratch, put: &mut Put) {
    let n_groups = product.n.min(DEPTH) / F::GROUP;
    let panel = Panel {
        weights: reserve(&mut scratch.weights, n_groups * F::GROUP * ROWS),
        start: reserve(&mut scratch.start, n_groups * ROWS * 4),
        scale: reserve(&mut scratch.scale, n_groups * ROWS * 4),
        min: reserve(&mut scratch.min, n_groups * ROWS * 4),
    };
    let act: *mut u8 = reserve(&mut scratch.act, TOKENS * DEPTH);
    let n_tokens = product.n_tokens;
    let sums: *mut __m512 = reserve(&mut scratch.sums, n_tokens * ROWS * 4);
    for first_row in (0..product.n_rows()).step_by(ROWS) {
        let n_rows = ROWS.min(product.n_rows() - first_row);
        for start in (0..product.n).step_by(DEPTH) {
            let depth = DEPTH.min(product.n - start);
            // SAFETY: the panel is allocated for `depth` elements of `ROWS` rows, `act` for `TOKENS` rows of `DEPTH` elements,
            // and `sums` for all tokens.
            unsafe {
                for half in 0..2 {
                    pack::<F>(product, first_row + half * 16, start, depth, half, &panel);
                }
                for token in (0..n_tokens).step_by(TOKENS) {
                    let sums = sums.add(token * 2);
                    match n_tokens - token {
                        1 => tile::<F, 1>(product, token, start, depth, &panel, act, sums),
                        2 => tile::<F, 2>(product, token, start, depth, &panel, act, sums),
                        3 => tile::<F, 3>(product, token, start, depth, &panel, act, sums),
                        4 => tile::<F, 4>(product, token, start, depth, &panel, act, sums),
                        5 => tile::<F, 5>(product, token, start, depth, &panel, act, sums),
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

/// Decodes elements `start..start + depth` of sixteen rows into one half of the panel. Rows beyond the last are copies of the
/// last; their sums are not used.
///
/// # Safety
/// The CPU has the instructions of this module, and the panel is allocated for `depth` elements.
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn pack<F: Steps>(
    product: &Product,
    first_row: usize,
    start: usize,
    depth: usize,
    half: usize,
    panel: &Panel,
) {
    let last = product.n_rows() - 1;
    let mut row = [&[] as &[F]; 16];
    for r in 0..16 {
        let at = (first_row + r).min(last) * product.row_size;
        row[r] = &blocks(&product.rows[at..][..product.row_size])[start / F::BLOCK..]
            [..depth / F::BLOCK];
    }
    let mut q = [[0i8; QK_K]; 16];
    let in_steps = depth / F::STEP * F::STEP;
    for element in (0..in_steps).step_by(F::STEP) {
        // SAFETY: the rows have a complete step from `element` on, a row of `q` has at least `F::STEP` bytes, and the panel is
        // allocated for `depth` elements.
        unsafe {
            for r in 0..16 {
                F::decode(row[r].as_ptr().add(element / F::BLOCK), q[r].as_mut_ptr());
            }
            pack_codes::<F>(&q, element, F::STEP, half, panel);
        }
    }
    if in_steps < depth {
        for r in 0..16 {
            row[r][in_steps / F::BLOCK].decode_codes(&mut q[r]);
        }
        // SAFETY: the panel is allocated for `depth` elements.
        unsafe { pack_codes::<F>(&q, in_steps, F::BLOCK, half, panel) }
    }
    for b in 0..depth / F::BLOCK {
        let mut block = [&row[0][b]; 16];
        for r in 1..16 {
            block[r] = &row[r][b];
        }
        let at = b * (F::BLOCK / F::GROUP) * 2 + half;
        // SAFETY: the panel is allocated for the groups of `depth` elements.
        unsafe { F::decode_scales_of_16(block, panel.scale.add(at), panel.min.add(at)) }
    }
}

/// Writes `n` decoded elements of sixteen rows to the panel, from element `element` on.
///
/// # Safety
/// The CPU has the instructions of this module, and the panel is allocated for `element + n` elements.
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
unsafe fn pack_codes<F: Format>(
    q: &[[i8; QK_K]; 16],
    element: usize,
    n: usize,
    half: usize,
    panel: &Panel,
) {
    for at in (0..n).step_by(64) {
        let vectors = transpose(load_64(q, at));
        for (part, vectors) in vectors[..(n - at).min(64) / 4]
            .chunks_exact(F::GROUP / 4)
            .enumerate()
        {
            let group = (element + at) / F::GROUP + part;
            let zero = _mm512_setzero_si512();
            let mut sum = zero;
            // SAFETY: the panel is allocated for the elements, by the contract of this function.
            unsafe {
                for (i, &vector) in vectors.iter().enumerate() {
                    panel
                        .weights
                        .add((group * (F::GROUP / 4) + i) * 2 + half)
                        .write(vector);
                    sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(-128), vector);
                }
                panel
                    .start
                    .add(group * 2 + half)
                    .write(_mm512_sub_epi32(zero, sum));
            }
        }
    }
}

/// Loads 64 codes of sixteen rows from element `at` on.
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
fn load_64(q: &[[i8; QK_K]; 16], at: usize) -> [__m512i; 16] {
    let mut v = [_mm512_setzero_si512(); 16];
    for r in 0..16 {
        // SAFETY: the slice has 64 bytes.
        v[r] = unsafe { _mm512_loadu_si512(q[r][at..][..64].as_ptr().cast()) };
    }
    v
}

/// Adds the products of the panel and `T` tokens to `sums[t][2]`; overwrites the sums at the start of a row.
///
/// # Safety
/// The CPU has the instructions of this module. The panel has the elements `start..start + depth` and `sums` has `T` tokens.
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn tile<F: Format, const T: usize>(
    product: &Product,
    token: usize,
    start: usize,
    depth: usize,
    panel: &Panel,
    codes: *mut u8,
    sums: *mut __m512,
) {
    let mut rows = [Q8Row::EMPTY; T];
    // Scale times sum of the codes of the activations of each group.
    let mut scaled_sums = [[0.0f32; DEPTH / 16]; T];
    for t in 0..T {
        rows[t] = Q8Row::new(F::ACTIVATION, product.n, (product.act)(token + t)).starting_at(start);
        // SAFETY: `codes` is allocated for `TOKENS >= T` rows of `DEPTH >= depth` bytes.
        let target = unsafe { std::slice::from_raw_parts_mut(codes.add(t * DEPTH), depth) };
        for (target, source) in target.iter_mut().zip(rows[t].q) {
            *target = (*source as u8) ^ 0x80;
        }
        if F::MIN {
            sum_groups::<F>(&rows[t], &mut scaled_sums[t][..depth / F::GROUP]);
        }
    }
    let mut acc = [[_mm512_setzero_ps(); 2]; T];
    // SAFETY: the panel and the activations have `depth` elements, and `sums` has `T` tokens, by the contract of this function.
    unsafe {
        if start > 0 {
            for t in 0..T {
                acc[t] = [*sums.add(t * 2), *sums.add(t * 2 + 1)];
            }
        }
        for group in 0..depth / F::GROUP {
            let mut sum = [[*panel.start.add(group * 2), *panel.start.add(group * 2 + 1)]; T];
            for i in 0..F::GROUP / 4 {
                let at = group * (F::GROUP / 4) + i;
                let weights = [*panel.weights.add(at * 2), *panel.weights.add(at * 2 + 1)];
                for t in 0..T {
                    let values = _mm512_set1_epi32(
                        codes.add(t * DEPTH + at * 4).cast::<i32>().read_unaligned(),
                    );
                    sum[t][0] = _mm512_dpbusd_epi32(sum[t][0], values, weights[0]);
                    sum[t][1] = _mm512_dpbusd_epi32(sum[t][1], values, weights[1]);
                }
            }
            for half in 0..2 {
                let scale = *panel.scale.add(group * 2 + half);
                for t in 0..T {
                    let act_scale = rows[t]
                        .scale
                        .get_unchecked(group * F::GROUP / act_block::<F>())
                        .get();
                    let scale = _mm512_mul_ps(scale, _mm512_set1_ps(act_scale));
                    acc[t][half] =
                        _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[t][half]), scale, acc[t][half]);
                }
                if F::MIN {
                    let min = *panel.min.add(group * 2 + half);
                    for t in 0..T {
                        let sum = _mm512_set1_ps(*scaled_sums[t].get_unchecked(group));
                        acc[t][half] = _mm512_fnmadd_ps(min, sum, acc[t][half]);
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
