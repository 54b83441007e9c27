//! Products of floating-point weights with several rows of activations.
//!
//! A panel has 32 rows, one per lane of two vectors. A lane has one element, or two bfloat16 elements; the next elements are in
//! the next two vectors. Activations are broadcast to all lanes.

use std::arch::x86_64::*;
use std::marker::PhantomData;

use zerocopy::byteorder::little_endian::F32;

use super::float::Widen;
use super::transpose::transpose;
use crate::cpu::quant::activation::floats;
use crate::cpu::quant::float::{Bf16, FloatFormat};
use crate::cpu::quant::gemm::{Product, Put, Scratch, reserve};

/// Rows per panel.
const ROWS: usize = 32;
/// Maximum lanes of a row in a panel.
const DEPTH: usize = 512;
/// Rows of activations that are multiplied with a panel at a time.
const TOKENS: usize = 6;

/// The contents of a 32-bit lane and the product of lanes.
pub trait Lane {
    /// The element type of the weights.
    type Element: FloatFormat;
    /// Elements per lane.
    const ELEMENTS: usize;

    /// Loads sixteen lanes from `n` elements; the elements beyond are 0.
    ///
    /// # Safety
    /// The CPU has the instructions of this type, and `n` elements can be read.
    unsafe fn load(at: *const Self::Element, n: usize) -> __m512i;

    /// The lanes of a row of activations: the row itself, or a conversion in `buffer`.
    ///
    /// # Safety
    /// The CPU has the instructions of this type, and `buffer` can be written for all lanes of the row.
    unsafe fn activations(row: &[F32], buffer: *mut u32) -> *const u32;

    /// `acc + weights * act`, where the products of a lane are added.
    ///
    /// # Safety
    /// The CPU has the instructions of this type.
    unsafe fn multiply_add(acc: __m512, weights: __m512i, act: __m512i) -> __m512;
}

/// One element per lane, converted to f32.
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
    unsafe fn activations(row: &[F32], _buffer: *mut u32) -> *const u32 {
        row.as_ptr().cast()
    }

    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    #[inline]
    unsafe fn multiply_add(acc: __m512, weights: __m512i, act: __m512i) -> __m512 {
        _mm512_fmadd_ps(_mm512_castsi512_ps(weights), _mm512_castsi512_ps(act), acc)
    }
}

/// Two bfloat16 elements per lane, for CPUs with AVX512-BF16.
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

    /// Takes the upper halves: the activations are rounded to bfloat16, so their lower halves are 0.
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    #[inline]
    unsafe fn activations(row: &[F32], buffer: *mut u32) -> *const u32 {
        for first in (0..row.len()).step_by(16) {
            let mask = !0u16 >> (16 - (row.len() - first).min(16));
            // SAFETY: the masks select elements that exist; with an odd number, the second half of the last lane is written, too.
            unsafe {
                let values = _mm512_castps_si512(F32::widen(row.as_ptr().add(first), mask));
                let halves = _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(values));
                _mm256_mask_storeu_epi16(buffer.cast::<i16>().add(first), mask | mask << 1, halves);
            }
        }
        buffer
    }

    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16")]
    #[inline]
    unsafe fn multiply_add(acc: __m512, weights: __m512i, act: __m512i) -> __m512 {
        // SAFETY: both types have 512 bits, and all bit patterns are valid.
        let (weights, act) = unsafe {
            (
                std::mem::transmute::<__m512i, __m512bh>(weights),
                std::mem::transmute::<__m512i, __m512bh>(act),
            )
        };
        _mm512_dpbf16_ps(acc, weights, act)
    }
}

/// Computes all products `row r · act(t)` and passes them to `put(t, r, products)`.
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
pub fn gemm_float<F: Widen>(product: &Product, scratch: &mut Scratch, put: &mut Put) {
    // SAFETY: the target features of this function are those of `Single`.
    unsafe { gemm::<Single<F>>(product, scratch, put) }
}

/// [`gemm_float`] for bfloat16 on CPUs with AVX512-BF16.
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16")]
pub fn gemm_bf16(product: &Product, scratch: &mut Scratch, put: &mut Put) {
    // SAFETY: the target features of this function are those of `Pair`.
    unsafe { gemm::<Pair>(product, scratch, put) }
}

/// The product with the lanes `L`. This function and those below are inlined into a function with the target features of `L`.
///
/// # Safety
/// The CPU has the instructions of `L`.
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
            // SAFETY: the panel is allocated for `DEPTH` lanes of `ROWS` rows, `act` for `TOKENS` rows of `DEPTH` lanes, and
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
            // SAFETY: `sums` has `ROWS` floats per token, which were written above.
            put(token, first_row, unsafe {
                std::slice::from_raw_parts(sums.add(token * 2).cast(), n_rows)
            });
        }
    }
}

/// Loads `n` elements of sixteen rows from element `start` on into one half of the panel. Rows beyond the last are copies of the
/// last; their sums are not used.
///
/// # Safety
/// The CPU has the instructions of `L`, and the panel is allocated for `n` elements.
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
        // SAFETY: each row has `n - first` elements from `first` on, and the panel is allocated for a multiple of sixteen lanes.
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

/// Adds the products of the panel and `T` tokens to `sums[t][2]`; overwrites the sums at the start of a row.
///
/// # Safety
/// The CPU has the instructions of this module. The panel has `n` elements and `sums` has `T` tokens.
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
        // SAFETY: `act` is allocated for `TOKENS >= T` rows of `DEPTH` lanes.
        rows[t] = unsafe { L::activations(row, act.add(t * DEPTH)) };
    }
    // SAFETY: the panel and the activations have `lanes` lanes, and `sums` has `T` tokens, by the contract of this function.
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
