//! Products of floating-point matrices.
//!
//! A panel holds 32 rows in the lanes of two vectors: one element of each row, or for bfloat16 two, then the next.
//! Activations are broadcast to all rows.

use std::arch::x86_64::*;
use std::marker::PhantomData;

use zerocopy::byteorder::little_endian::F32;

use super::float::Widen;
use super::transpose::transpose;
use crate::cpu::quant::activation::floats;
use crate::cpu::quant::float::{Bf16, FloatFormat};
use crate::cpu::quant::gemm::{Product, Put, Scratch, reserve};

/// Rows of a panel.
const ROWS: usize = 32;
/// Lanes of a row that a panel holds at most.
const DEPTH: usize = 512;
/// Rows of activations that pass through a panel together.
const TOKENS: usize = 6;

/// What a lane of 32 bits holds of a row, and how lanes are multiplied.
pub trait Lane {
    /// The elements of the rows.
    type Element: FloatFormat;
    /// Elements in a lane.
    const ELEMENTS: usize;

    /// Sixteen lanes, of which the first `n` elements exist; zero beyond.
    ///
    /// # Safety
    /// The processor has the instructions, and `n` elements can be read.
    unsafe fn load(at: *const Self::Element, n: usize) -> __m512i;

    /// The lanes of a row of activations; `room` holds as many.
    ///
    /// # Safety
    /// The processor has the instructions, and `room` can be written.
    unsafe fn activations(row: &[F32], room: *mut u32) -> *const u32;

    /// `acc + weights * act`, summed within a lane.
    ///
    /// # Safety
    /// The processor has the instructions.
    unsafe fn multiply_add(acc: __m512, weights: __m512i, act: __m512i) -> __m512;
}

/// One widened element.
pub struct Single<F>(PhantomData<F>);

impl<F: Widen> Lane for Single<F> {
    type Element = F;
    const ELEMENTS: usize = 1;

    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    #[inline]
    unsafe fn load(at: *const F, n: usize) -> __m512i {
        // SAFETY: the mask selects `n` elements.
        unsafe { _mm512_castps_si512(F::widen(at, !0u16 >> (16 - n.min(16)))) }
    }

    #[inline(always)]
    unsafe fn activations(row: &[F32], _room: *mut u32) -> *const u32 {
        row.as_ptr().cast()
    }

    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    #[inline]
    unsafe fn multiply_add(acc: __m512, weights: __m512i, act: __m512i) -> __m512 {
        _mm512_fmadd_ps(_mm512_castsi512_ps(weights), _mm512_castsi512_ps(act), acc)
    }
}

/// Two bfloat16 elements, for processors that multiply them directly.
pub struct Pair;

impl Lane for Pair {
    type Element = Bf16;
    const ELEMENTS: usize = 2;

    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    #[inline]
    unsafe fn load(at: *const Bf16, n: usize) -> __m512i {
        // SAFETY: the mask selects `n` elements.
        unsafe { _mm512_maskz_loadu_epi16(!0u32 >> (32 - n.min(32)), at.cast()) }
    }

    /// The activations are bfloat16 numbers already: their lower halves are zero.
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    #[inline]
    unsafe fn activations(row: &[F32], room: *mut u32) -> *const u32 {
        for first in (0..row.len()).step_by(16) {
            let mask = !0u16 >> (16 - (row.len() - first).min(16));
            // SAFETY: the mask selects elements that exist; zeros fill up the last lane.
            unsafe {
                let values = _mm512_castps_si512(F32::widen(row.as_ptr().add(first), mask));
                let halves = _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(values));
                _mm256_mask_storeu_epi16(room.cast::<i16>().add(first), mask | mask << 1, halves);
            }
        }
        room
    }

    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16")]
    #[inline]
    unsafe fn multiply_add(acc: __m512, weights: __m512i, act: __m512i) -> __m512 {
        // SAFETY: both types are 512 bits without invalid values.
        let (weights, act) = unsafe {
            (
                std::mem::transmute::<__m512i, __m512bh>(weights),
                std::mem::transmute::<__m512i, __m512bh>(act),
            )
        };
        _mm512_dpbf16_ps(acc, weights, act)
    }
}

/// `put(t, r, [row r · act(t), ..])` for all.
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
pub fn gemm_float<F: Widen>(product: &Product, scratch: &mut Scratch, put: &mut Put) {
    // SAFETY: this function has the instructions that `Single` needs.
    unsafe { gemm::<Single<F>>(product, scratch, put) }
}

/// As [`gemm_float`].
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16")]
pub fn gemm_bf16(product: &Product, scratch: &mut Scratch, put: &mut Put) {
    // SAFETY: this function has the instructions that `Pair` needs.
    unsafe { gemm::<Pair>(product, scratch, put) }
}

/// Inlined, like all below, into functions that have the instructions of `L`.
#[inline(always)]
unsafe fn gemm<L: Lane>(product: &Product, scratch: &mut Scratch, put: &mut Put) {
    let panel: *mut __m512i = reserve(&mut scratch.weights, DEPTH * ROWS * 4);
    let act: *mut u32 = reserve(&mut scratch.act, TOKENS * DEPTH * 4);
    let n_tokens = product.n_tokens;
    let sums: *mut __m512 = reserve(&mut scratch.sums, n_tokens * ROWS * 4);
    for first_row in (0..product.n_rows()).step_by(ROWS) {
        let n_rows = ROWS.min(product.n_rows() - first_row);
        for start in (0..product.n).step_by(DEPTH * L::ELEMENTS) {
            let n = (DEPTH * L::ELEMENTS).min(product.n - start);
            // SAFETY: the panel has room for `DEPTH` lanes of `ROWS` rows, `act` for `TOKENS` rows of `DEPTH` lanes, and
            // `sums` for all tokens.
            unsafe {
                for half in 0..2 {
                    pack::<L>(product, first_row + half * 16, start, n, panel.add(half));
                }
                for token in (0..n_tokens).step_by(TOKENS) {
                    let sums = sums.add(token * 2);
                    match n_tokens - token {
                        1 => tile::<L, 1>(product, token, start, n, panel, act, sums),
                        2 => tile::<L, 2>(product, token, start, n, panel, act, sums),
                        3 => tile::<L, 3>(product, token, start, n, panel, act, sums),
                        4 => tile::<L, 4>(product, token, start, n, panel, act, sums),
                        5 => tile::<L, 5>(product, token, start, n, panel, act, sums),
                        _ => tile::<L, TOKENS>(product, token, start, n, panel, act, sums),
                    }
                }
            }
        }
        for token in 0..n_tokens {
            // SAFETY: `sums` has `ROWS` floats for each token, written above.
            put(token, first_row, unsafe {
                std::slice::from_raw_parts(sums.add(token * 2).cast(), n_rows)
            });
        }
    }
}

/// Brings `n` elements of sixteen rows from element `start` on into one half of the panel. Rows beyond the last are
/// copies of it; their sums are not used.
#[inline(always)]
unsafe fn pack<L: Lane>(
    product: &Product,
    first_row: usize,
    start: usize,
    n: usize,
    panel: *mut __m512i,
) {
    let last = product.n_rows() - 1;
    let mut row = [&[] as &[L::Element]; 16];
    for r in 0..16 {
        let at = (first_row + r).min(last) * product.row_size;
        row[r] = &L::Element::elements(&product.rows[at..][..product.row_size])[start..][..n];
    }
    for first in (0..n).step_by(16 * L::ELEMENTS) {
        // SAFETY: at least `n - first` elements are left in each row, and the panel has room for a multiple of sixteen
        // lanes.
        unsafe {
            let mut v = [_mm512_setzero_si512(); 16];
            for r in 0..16 {
                v[r] = L::load(row[r].as_ptr().add(first), n - first);
            }
            for (i, vector) in transpose(v).into_iter().enumerate() {
                panel.add((first / L::ELEMENTS + i) * 2).write(vector);
            }
        }
    }
}

/// Adds (or, at the start of a row, sets) the products of the panel and `T` tokens to `sums[t][2]`.
#[inline(always)]
unsafe fn tile<L: Lane, const T: usize>(
    product: &Product,
    token: usize,
    start: usize,
    n: usize,
    panel: *const __m512i,
    act: *mut u32,
    sums: *mut __m512,
) {
    let lanes = n.div_ceil(L::ELEMENTS);
    let mut rows = [std::ptr::null(); T];
    for t in 0..T {
        let row = &floats(product.n, (product.act)(token + t))[start..][..n];
        // SAFETY: `act` has room for `T` rows.
        rows[t] = unsafe { L::activations(row, act.add(t * DEPTH)) };
    }
    // SAFETY: the panel and the activations have `lanes` lanes, `sums` has room for `T` tokens.
    unsafe {
        let mut acc = [[_mm512_setzero_ps(); 2]; T];
        if start > 0 {
            for t in 0..T {
                acc[t] = [*sums.add(t * 2), *sums.add(t * 2 + 1)];
            }
        }
        for lane in 0..lanes {
            let weights = [*panel.add(lane * 2), *panel.add(lane * 2 + 1)];
            for t in 0..T {
                let values = _mm512_set1_epi32(rows[t].add(lane).cast::<i32>().read_unaligned());
                acc[t][0] = L::multiply_add(acc[t][0], weights[0], values);
                acc[t][1] = L::multiply_add(acc[t][1], weights[1], values);
            }
        }
        for t in 0..T {
            *sums.add(t * 2) = acc[t][0];
            *sums.add(t * 2 + 1) = acc[t][1];
        }
    }
}
