//! Products of floating-point weights with several rows of activations.
//!
//! A panel has 16 rows, one per lane of two vectors; the next element of the rows is in the next two vectors. Activations are
//! broadcast to all lanes.

use std::arch::x86_64::*;

use super::float::Widen;
use super::transpose::transpose;
use crate::cpu::quant::activation::floats;
use crate::cpu::quant::gemm::{Product, Put, Scratch, reserve};

/// Rows per panel.
const ROWS: usize = 16;
/// Maximum elements of a row in a panel.
const DEPTH: usize = 512;
/// Rows of activations that are multiplied with a panel at a time.
const TOKENS: usize = 6;

/// Computes all products `row r · act(t)` and passes them to `put(t, r, products)`.
#[target_feature(enable = "avx2,fma,f16c")]
pub fn gemm_float<F: Widen>(product: &Product, scratch: &mut Scratch, put: &mut Put) {
    let panel: *mut __m256 = reserve(&mut scratch.weights, DEPTH * ROWS * 4);
    let n_tokens = product.n_tokens;
    let sums: *mut __m256 = reserve(&mut scratch.sums, n_tokens * ROWS * 4);
    for first_row in (0..product.n_rows()).step_by(ROWS) {
        let n_rows = ROWS.min(product.n_rows() - first_row);
        for start in (0..product.n).step_by(DEPTH) {
            let n = DEPTH.min(product.n - start);
            // SAFETY: the panel is allocated for `DEPTH` elements of `ROWS` rows, and `sums` for all tokens.
            unsafe {
                for half in 0..2 {
                    pack::<F>(product, first_row + half * 8, start, n, panel.add(half));
                }
                for token in (0..n_tokens).step_by(TOKENS) {
                    let sums = sums.add(token * 2);
                    match n_tokens - token {
                        1 => tile::<1>(product, token, start, n, panel, sums),
                        2 => tile::<2>(product, token, start, n, panel, sums),
                        3 => tile::<3>(product, token, start, n, panel, sums),
                        4 => tile::<4>(product, token, start, n, panel, sums),
                        5 => tile::<5>(product, token, start, n, panel, sums),
                        _ => tile::<TOKENS>(product, token, start, n, panel, sums),
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

/// Converts `n` elements of eight rows from element `start` on to f32, into one half of the panel. Rows beyond the last are
/// copies of the last; their sums are not used.
///
/// # Safety
/// The CPU has the instructions of this module, and the panel is allocated for `n` elements.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn pack<F: Widen>(
    product: &Product,
    first_row: usize,
    start: usize,
    n: usize,
    panel: *mut __m256,
) {
    let last = product.n_rows() - 1;
    let mut row = [&[] as &[F]; 8];
    for r in 0..8 {
        let at = (first_row + r).min(last) * product.row_size;
        row[r] = &F::elements(&product.rows[at..][..product.row_size])[start..][..n];
    }
    let vectorized = n / 8 * 8;
    for first in (0..vectorized).step_by(8) {
        let mut v = [_mm256_setzero_si256(); 8];
        for r in 0..8 {
            // SAFETY: each row has eight elements from `first` on.
            v[r] = unsafe { _mm256_castps_si256(F::widen(row[r].as_ptr().add(first))) };
        }
        for (i, vector) in transpose(v).into_iter().enumerate() {
            // SAFETY: the panel is allocated for `n` elements, by the contract of this function.
            unsafe {
                panel
                    .add((first + i) * 2)
                    .write(_mm256_castsi256_ps(vector))
            }
        }
    }
    for i in vectorized..n {
        for r in 0..8 {
            // SAFETY: the panel is allocated for `n` elements, by the contract of this function.
            unsafe {
                panel
                    .add(i * 2)
                    .cast::<f32>()
                    .add(r)
                    .write(row[r][i].to_f32())
            }
        }
    }
}

/// Adds the products of the panel and `T` tokens to `sums[t][2]`; overwrites the sums at the start of a row.
///
/// # Safety
/// The CPU has the instructions of this module. The panel has `n` elements and `sums` has `T` tokens.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn tile<const T: usize>(
    product: &Product,
    token: usize,
    start: usize,
    n: usize,
    panel: *const __m256,
    sums: *mut __m256,
) {
    let mut rows = [std::ptr::null::<f32>(); T];
    for t in 0..T {
        rows[t] = floats(product.n, (product.act)(token + t))[start..][..n]
            .as_ptr()
            .cast();
    }
    // SAFETY: the panel and the activations have `n` elements, and `sums` has `T` tokens, by the contract of this function.
    unsafe {
        let mut acc = [[_mm256_setzero_ps(); 2]; T];
        if start > 0 {
            for t in 0..T {
                acc[t] = [*sums.add(t * 2), *sums.add(t * 2 + 1)];
            }
        }
        for i in 0..n {
            let weights = [*panel.add(i * 2), *panel.add(i * 2 + 1)];
            for t in 0..T {
                let value = _mm256_set1_ps(rows[t].add(i).read_unaligned());
                acc[t][0] = _mm256_fmadd_ps(weights[0], value, acc[t][0]);
                acc[t][1] = _mm256_fmadd_ps(weights[1], value, acc[t][1]);
            }
        }
        for t in 0..T {
            *sums.add(t * 2) = acc[t][0];
            *sums.add(t * 2 + 1) = acc[t][1];
        }
    }
}
