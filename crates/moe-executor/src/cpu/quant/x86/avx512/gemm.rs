//! Products of quantized matrices.
//!
//! A panel holds 32 rows in the lanes of two vectors: four elements of each row, then the next four. Activations are
//! broadcast, four at a time, to all rows. VNNI wants one side unsigned, so activations are offset by 128, and the sums
//! start at minus 128 times the weights.

use std::arch::x86_64::*;

use super::Steps;
use crate::cpu::quant::ActivationType;
use crate::cpu::quant::activation::Q8Row;
use crate::cpu::quant::format::{Format, QK_K};
use crate::cpu::quant::gemm::{Product, Put, Scratch, reserve};
use crate::cpu::quant::portable::blocks;

/// Rows of a panel.
const ROWS: usize = 32;
/// Elements of a row that a panel holds at most; a multiple of every block.
const DEPTH: usize = 2048;
/// Rows of activations that pass through a panel together.
const TOKENS: usize = 6;

/// The panel's parts; the vectors for one group of elements follow one another.
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

/// `put(t, r, [row r · act(t), ..])` for all.
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
            // SAFETY: the panel has room for `DEPTH` elements of `ROWS` rows, `act` for `TOKENS` rows of `DEPTH`, and
            // `sums` for all tokens.
            unsafe {
                for half in 0..2 {
                    pack::<F>(product, first_row + half * 16, start, depth, half, &panel);
                }
                let mut token = 0;
                while token < n_tokens {
                    let n = TOKENS.min(n_tokens - token);
                    let sums = sums.add(token * 2);
                    match n {
                        1 => tile::<F, 1>(product, token, start, depth, &panel, act, sums),
                        2 => tile::<F, 2>(product, token, start, depth, &panel, act, sums),
                        3 => tile::<F, 3>(product, token, start, depth, &panel, act, sums),
                        4 => tile::<F, 4>(product, token, start, depth, &panel, act, sums),
                        5 => tile::<F, 5>(product, token, start, depth, &panel, act, sums),
                        _ => tile::<F, TOKENS>(product, token, start, depth, &panel, act, sums),
                    }
                    token += n;
                }
            }
        }
        for token in 0..n_tokens {
            // SAFETY: `sums` has `ROWS` floats for each token, written above.
            put(token, first_row, unsafe { std::slice::from_raw_parts(sums.add(token * 2).cast(), n_rows) });
        }
    }
}

/// Decodes elements `start..start + depth` of sixteen rows into one half of the panel. Rows beyond the last are copies
/// of it; their sums are not used.
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn pack<F: Steps>(product: &Product, first_row: usize, start: usize, depth: usize, half: usize, panel: &Panel) {
    let last = product.n_rows() - 1;
    let mut row = [&[] as &[F]; 16];
    for r in 0..16 {
        let at = (first_row + r).min(last) * product.row_size;
        row[r] = &blocks(&product.rows[at..][..product.row_size])[start / F::BLOCK..][..depth / F::BLOCK];
    }
    let mut q = [[0i8; QK_K]; 16];
    let whole = depth / F::STEP * F::STEP;
    for element in (0..whole).step_by(F::STEP) {
        // SAFETY: the rows have `depth` elements, of which a whole step is left; the panel has room for them.
        unsafe {
            for r in 0..16 {
                F::decode(row[r].as_ptr().add(element / F::BLOCK), q[r].as_mut_ptr());
            }
            pack_codes::<F>(&q, element, F::STEP, half, panel);
        }
    }
    if whole < depth {
        for r in 0..16 {
            row[r][whole / F::BLOCK].decode_codes(&mut q[r]);
        }
        // SAFETY: the panel has room for `depth` elements.
        unsafe { pack_codes::<F>(&q, whole, F::BLOCK, half, panel) }
    }
    // SAFETY: the panel has room for `depth` elements.
    unsafe { pack_scales(&row, half, panel) }
}

/// Puts `n` decoded elements of sixteen rows, the first of which is number `element`, into the panel.
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
unsafe fn pack_codes<F: Format>(q: &[[i8; QK_K]; 16], element: usize, n: usize, half: usize, panel: &Panel) {
    for at in (0..n).step_by(32) {
        let vectors = transpose(q, at);
        for (part, vectors) in vectors.chunks_exact(F::GROUP / 4).enumerate() {
            let group = (element + at) / F::GROUP + part;
            let zero = _mm512_setzero_si512();
            let mut sum = zero;
            // SAFETY: the caller has room for the elements.
            unsafe {
                for (i, &vector) in vectors.iter().enumerate() {
                    panel.weights.add((group * (F::GROUP / 4) + i) * 2 + half).write(vector);
                    sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(-128), vector);
                }
                panel.start.add(group * 2 + half).write(_mm512_sub_epi32(zero, sum));
            }
        }
    }
}

/// Puts the scales and minima of sixteen rows into the panel.
#[inline(always)]
unsafe fn pack_scales<F: Format>(row: &[&[F]; 16], half: usize, panel: &Panel) {
    let (mut scales, mut mins) = ([0.0; QK_K / 16], [0.0; QK_K / 16]);
    let groups = F::BLOCK / F::GROUP;
    for r in 0..16 {
        for (b, block) in row[r].iter().enumerate() {
            block.decode_scales(&mut scales, &mut mins);
            for i in 0..groups {
                let at = (b * groups + i) * 2 + half;
                // SAFETY: the caller has room for all groups.
                unsafe {
                    panel.scale.add(at).cast::<f32>().add(r).write(scales[i]);
                    if F::MIN {
                        panel.min.add(at).cast::<f32>().add(r).write(mins[i]);
                    }
                }
            }
        }
    }
}

/// Turns 32 elements of sixteen rows into eight vectors of four elements of each row.
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
fn transpose(q: &[[i8; QK_K]; 16], at: usize) -> [__m512i; 8] {
    let mut v = [_mm512_setzero_si512(); 8];
    for r in 0..8 {
        let (low, high) = (&q[r][at..][..32], &q[r + 8][at..][..32]);
        // SAFETY: the slices have 32 bytes.
        let (low, high) =
            unsafe { (_mm256_loadu_si256(low.as_ptr().cast()), _mm256_loadu_si256(high.as_ptr().cast())) };
        v[r] = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high);
    }
    // Three rounds exchange single elements, pairs and halves between rows 1, 2 and 4 apart, in each 256 bits.
    let mut w = v;
    for r in 0..4 {
        w[2 * r] = _mm512_unpacklo_epi32(v[2 * r], v[2 * r + 1]);
        w[2 * r + 1] = _mm512_unpackhi_epi32(v[2 * r], v[2 * r + 1]);
    }
    for r in [0, 1, 4, 5] {
        v[r] = _mm512_unpacklo_epi64(w[r], w[r + 2]);
        v[r + 2] = _mm512_unpackhi_epi64(w[r], w[r + 2]);
    }
    let low = _mm512_set_epi64(13, 12, 5, 4, 9, 8, 1, 0);
    let high = _mm512_set_epi64(15, 14, 7, 6, 11, 10, 3, 2);
    // The rounds before have left elements 0, 2, 1, 3 (and 4 more in the upper lanes) in rows 0 to 3.
    for (r, i) in [(0, 0), (2, 1), (1, 2), (3, 3)] {
        w[i] = _mm512_permutex2var_epi64(v[r], low, v[r + 4]);
        w[i + 4] = _mm512_permutex2var_epi64(v[r], high, v[r + 4]);
    }
    w
}

/// Adds (or, at the start of a row, sets) the products of the panel and `T` tokens to `sums[t][2]`.
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
    for t in 0..T {
        rows[t] = Q8Row::new(F::ACTIVATION, product.n, (product.act)(token + t)).starting_at(start);
        let source = &rows[t].q[..depth];
        // SAFETY: `codes` has room for `T` rows.
        let target = unsafe { std::slice::from_raw_parts_mut(codes.add(t * DEPTH), depth) };
        for (target, source) in target.iter_mut().zip(source) {
            *target = (*source as u8) ^ 0x80;
        }
    }
    let mut acc = [[_mm512_setzero_ps(); 2]; T];
    // SAFETY: the panel and the activations have `depth` elements, `sums` has room for `T` tokens.
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
                    let values = _mm512_set1_epi32(codes.add(t * DEPTH + at * 4).cast::<i32>().read_unaligned());
                    sum[t][0] = _mm512_dpbusd_epi32(sum[t][0], values, weights[0]);
                    sum[t][1] = _mm512_dpbusd_epi32(sum[t][1], values, weights[1]);
                }
            }
            for half in 0..2 {
                let scale = *panel.scale.add(group * 2 + half);
                for t in 0..T {
                    let scale = _mm512_mul_ps(scale, _mm512_set1_ps(act_scale::<F>(&rows[t], group)));
                    acc[t][half] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[t][half]), scale, acc[t][half]);
                }
                if F::MIN {
                    let min = *panel.min.add(group * 2 + half);
                    for t in 0..T {
                        let sum = _mm512_set1_ps(scaled_sum::<F>(&rows[t], group));
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

/// The scale of the activations of a group.
#[inline(always)]
unsafe fn act_scale<F: Format>(row: &Q8Row, group: usize) -> f32 {
    let block = if F::ACTIVATION == ActivationType::Q8K { QK_K } else { 32 };
    // SAFETY: the caller passes a group of the row.
    unsafe { row.scale.get_unchecked(group * F::GROUP / block).get() }
}

/// Scale times sum of the activations of a group.
#[inline(always)]
unsafe fn scaled_sum<F: Format>(row: &Q8Row, group: usize) -> f32 {
    // SAFETY: the caller passes a group of the row.
    unsafe {
        match (F::ACTIVATION, F::GROUP) {
            (ActivationType::Q8_1, _) => row.scaled_sum.get_unchecked(group).get(),
            (_, 16) => act_scale::<F>(row, group) * f32::from(row.sum.get_unchecked(group).get()),
            _ => {
                let sums = [row.sum.get_unchecked(group * 2).get(), row.sum.get_unchecked(group * 2 + 1).get()];
                act_scale::<F>(row, group) * f32::from(sums[0] + sums[1])
            }
        }
    }
}
