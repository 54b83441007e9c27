//! Super-blocks of 256 elements.
//!
//! Products of neighbouring elements are added in 16 bits, which their ranges fit, and multiplied by the group's integer
//! scale into 32 bits; a super-block is one exact integer sum before it meets a floating-point scale.

use std::arch::x86_64::*;

use super::{Steps, scale};
use crate::cpu::quant::activation::Q8Row;
use crate::cpu::quant::format::QK_K;
use crate::cpu::quant::k_quants::{Q2K, Q3K, Q4K, Q5K, Q6K, q3_k_scales, scales_and_mins};

/// The activations of a super-block.
#[derive(Clone, Copy)]
pub struct Activations {
    codes: [__m512i; 4],
    /// The sum of each sixteen codes, 16 bits.
    sums: __m256i,
    scale: f32,
}

/// Loads a super-block's activations, 32 from each of the two `starts` into each vector.
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
unsafe fn load(act: &Q8Row, step: usize, starts: [[usize; 2]; 4]) -> Activations {
    // SAFETY: the activations have 256 codes, 16 sums and a scale for each step, and `starts` are below 256 - 31.
    unsafe {
        let first = act.q.as_ptr().add(step * QK_K);
        let mut codes = [_mm512_setzero_si512(); 4];
        for (codes, [low, high]) in codes.iter_mut().zip(starts) {
            let low = _mm256_loadu_si256(first.add(low).cast());
            let high = _mm256_loadu_si256(first.add(high).cast());
            *codes = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high);
        }
        let sums = _mm256_loadu_si256(act.sum.as_ptr().add(step * 16).cast());
        Activations {
            codes,
            sums,
            scale: act.scale.get_unchecked(step).get(),
        }
    }
}

/// In the order of the elements.
const IN_ORDER: [[usize; 2]; 4] = [[0, 32], [64, 96], [128, 160], [192, 224]];
/// Each half vector skips 32 elements, which are the high halves of the same bytes.
const BY_NIBBLE: [[usize; 2]; 4] = [[0, 64], [32, 96], [128, 192], [160, 224]];
/// The same 32 elements of both halves of a super-block.
const BY_HALF: [[usize; 2]; 4] = [[0, 128], [32, 160], [64, 192], [96, 224]];

/// Adds `codes · act` times the scales that `index` picks from the sixteen in `scales`.
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
fn add_products(
    sum: __m512i,
    codes: __m512i,
    act: __m512i,
    scales: __m256i,
    index: __m512i,
) -> __m512i {
    let scales = _mm512_permutexvar_epi16(index, _mm512_castsi256_si512(scales));
    _mm512_dpwssd_epi32(sum, _mm512_maddubs_epi16(codes, act), scales)
}

/// Sixteen copies each of two group numbers; a group has 32 elements.
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
fn groups_of_32(low: i16, high: i16) -> __m512i {
    _mm512_inserti64x4::<1>(
        _mm512_castsi256_si512(_mm256_set1_epi16(low)),
        _mm256_set1_epi16(high),
    )
}

/// Eight copies each of two group numbers and their successors; a group has 16 elements.
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
fn groups_of_16(low: i16, high: i16) -> __m512i {
    let next = _mm512_set_epi64(!0, !0, 0, 0, !0, !0, 0, 0);
    _mm512_sub_epi16(groups_of_32(low, high), next)
}

/// `acc + sum * d * act + minima * -dmin * act`.
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
fn add_scaled(acc: __m512, sum: __m512i, d: __m512, minima: __m256i, dmin: __m512) -> __m512 {
    let acc = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), d, acc);
    _mm512_fnmadd_ps(
        _mm512_zextps256_ps512(_mm256_cvtepi32_ps(minima)),
        dmin,
        acc,
    )
}

/// `sum - 2^SHIFT * minima`.
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
fn take_off<const SHIFT: i32>(sum: __m512i, minima: __m256i) -> __m512i {
    _mm512_sub_epi32(
        sum,
        _mm512_zextsi256_si512(_mm256_slli_epi32::<SHIFT>(minima)),
    )
}

/// Eight unsigned bytes as 16 bits.
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
fn widen_8(bytes: [u8; 8]) -> __m128i {
    _mm_cvtepu8_epi16(_mm_cvtsi64_si128(i64::from_le_bytes(bytes)))
}

/// Minima of groups of 32 times the sums of the activations.
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
fn minima_of_32(mins: [u8; 8], sums: __m256i) -> __m256i {
    let twice = _mm256_set_epi16(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
    let mins = _mm256_permutexvar_epi16(twice, _mm256_castsi128_si256(widen_8(mins)));
    _mm256_madd_epi16(mins, sums)
}

/// Loads 64 bytes.
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
fn load_64(bytes: &[u8; 64]) -> __m512i {
    // SAFETY: the array has 64 bytes.
    unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
}

/// Loads 32 bytes into both halves.
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
fn load_32_twice(bytes: &[u8; 32]) -> __m512i {
    // SAFETY: the array has 32 bytes.
    unsafe { _mm512_broadcast_i64x4(_mm256_loadu_si256(bytes.as_ptr().cast())) }
}

/// The two 64-byte halves of 128 bytes.
fn halves(bytes: &[u8; 128]) -> [&[u8; 64]; 2] {
    let (halves, _) = bytes.as_chunks::<64>();
    [&halves[0], &halves[1]]
}

/// Sixteen bytes as 16 bits.
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
fn load_16(bytes: &[u8; 16]) -> __m128i {
    // SAFETY: the array has 16 bytes.
    unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) }
}

macro_rules! super_block {
    ($format:ty, $order:ident, |$block:ident, $act:ident, $acc:ident| $body:expr) => {
        impl Steps for $format {
            const STEP: usize = QK_K;
            type Activations = Activations;

            #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
            #[inline]
            unsafe fn load(act: &Q8Row, step: usize) -> Activations {
                // SAFETY: the caller's promise.
                unsafe { load(act, step, $order) }
            }

            #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
            #[inline]
            unsafe fn step(block: *const $format, $act: &Activations, $acc: __m512) -> __m512 {
                // SAFETY: the caller's promise.
                let $block = unsafe { &*block };
                $body
            }
        }
    };
}

super_block!(Q2K, BY_HALF, |block, act, acc| {
    let (packed, bytes) = (load_16(&block.scales), load_64(&block.qs));
    let low = _mm_set1_epi8(15);
    let scales = _mm256_cvtepu8_epi16(_mm_and_si128(packed, low));
    let mins = _mm256_cvtepu8_epi16(_mm_and_si128(_mm_srli_epi16::<4>(packed), low));
    let three = _mm512_set1_epi8(3);
    let mut sum = _mm512_setzero_si512();
    for part in 0..4 {
        let codes = _mm512_and_si512(_mm512_srl_epi16(bytes, _mm_cvtsi32_si128(2 * part)), three);
        let index = groups_of_16(2 * part as i16, 8 + 2 * part as i16);
        sum = add_products(sum, codes, act.codes[part as usize], scales, index);
    }
    let minima = _mm256_madd_epi16(mins, act.sums);
    add_scaled(
        acc,
        sum,
        scale(block.d, act.scale),
        minima,
        scale(block.dmin, act.scale),
    )
});

super_block!(Q3K, BY_HALF, |block, act, acc| {
    let (bytes, high) = (load_64(&block.qs), load_32_twice(&block.hmask));
    let scales = _mm256_cvtepu8_epi16(load_16(&q3_k_scales(&block.scales)));
    let scales = _mm256_sub_epi16(scales, _mm256_set1_epi16(32));
    let (three, four) = (_mm512_set1_epi8(3), _mm512_set1_epi8(4));
    let first = _mm512_inserti64x4::<1>(_mm512_set1_epi8(1), _mm256_set1_epi8(16));
    let mut sum = _mm512_setzero_si512();
    for part in 0..4 {
        let codes = _mm512_and_si512(_mm512_srl_epi16(bytes, _mm_cvtsi32_si128(2 * part)), three);
        let third = _mm512_test_epi8_mask(high, _mm512_sll_epi16(first, _mm_cvtsi32_si128(part)));
        let codes = _mm512_mask_add_epi8(codes, third, codes, four);
        let index = groups_of_16(2 * part as i16, 8 + 2 * part as i16);
        sum = add_products(sum, codes, act.codes[part as usize], scales, index);
    }
    let sum = take_off::<2>(sum, _mm256_madd_epi16(scales, act.sums));
    _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scale(block.d, act.scale), acc)
});

super_block!(Q4K, BY_NIBBLE, |block, act, acc| {
    let (scales, mins) = scales_and_mins(&block.scales);
    let scales = _mm256_castsi128_si256(widen_8(scales));
    let low = _mm512_set1_epi8(15);
    let mut sum = _mm512_setzero_si512();
    for (half, bytes) in halves(&block.qs).into_iter().enumerate() {
        let bytes = load_64(bytes);
        let group = 4 * half as i16;
        let codes = _mm512_and_si512(bytes, low);
        sum = add_products(
            sum,
            codes,
            act.codes[half * 2],
            scales,
            groups_of_32(group, group + 2),
        );
        let codes = _mm512_and_si512(_mm512_srli_epi16::<4>(bytes), low);
        sum = add_products(
            sum,
            codes,
            act.codes[half * 2 + 1],
            scales,
            groups_of_32(group + 1, group + 3),
        );
    }
    let minima = minima_of_32(mins, act.sums);
    add_scaled(
        acc,
        sum,
        scale(block.d, act.scale),
        minima,
        scale(block.dmin, act.scale),
    )
});

super_block!(Q5K, BY_NIBBLE, |block, act, acc| {
    let (scales, mins) = scales_and_mins(&block.scales);
    let scales = _mm256_castsi128_si256(widen_8(scales));
    let (low, sixteen) = (_mm512_set1_epi8(15), _mm512_set1_epi8(16));
    let high = load_32_twice(&block.qh);
    // The fifth bit of a group has the group's number.
    let first = _mm512_inserti64x4::<1>(_mm512_set1_epi8(1), _mm256_set1_epi8(4));
    let mut sum = _mm512_setzero_si512();
    for (half, bytes) in halves(&block.qs).into_iter().enumerate() {
        let bytes = load_64(bytes);
        for upper in 0..2 {
            let group = 4 * half + upper;
            let codes = match upper {
                0 => _mm512_and_si512(bytes, low),
                _ => _mm512_and_si512(_mm512_srli_epi16::<4>(bytes), low),
            };
            let fifth = _mm512_test_epi8_mask(
                high,
                _mm512_sll_epi16(first, _mm_cvtsi32_si128(group as i32)),
            );
            let codes = _mm512_mask_add_epi8(codes, fifth, codes, sixteen);
            let index = groups_of_32(group as i16, group as i16 + 2);
            sum = add_products(sum, codes, act.codes[half * 2 + upper], scales, index);
        }
    }
    let minima = minima_of_32(mins, act.sums);
    add_scaled(
        acc,
        sum,
        scale(block.d, act.scale),
        minima,
        scale(block.dmin, act.scale),
    )
});

super_block!(Q6K, IN_ORDER, |block, act, acc| {
    let scales = _mm256_cvtepi8_epi16(load_16(&block.scales.map(|s| s as u8)));
    let (low, upper) = (_mm512_set1_epi8(15), _mm512_set1_epi8(0x30));
    let (high_halves, _) = block.qh.as_chunks::<32>();
    let mut sum = _mm512_setzero_si512();
    for (half, bytes) in halves(&block.ql).into_iter().enumerate() {
        let bytes = load_64(bytes);
        let high = load_32_twice(&high_halves[half]);
        let left = _mm512_set_epi64(2, 2, 2, 2, 4, 4, 4, 4);
        let high_of_low = _mm512_and_si512(_mm512_sllv_epi64(high, left), upper);
        let codes = _mm512_or_si512(_mm512_and_si512(bytes, low), high_of_low);
        let group = 8 * half as i16;
        sum = add_products(
            sum,
            codes,
            act.codes[half * 2],
            scales,
            groups_of_16(group, group + 2),
        );
        let right = _mm512_set_epi64(2, 2, 2, 2, 0, 0, 0, 0);
        let high_of_high = _mm512_and_si512(_mm512_srlv_epi64(high, right), upper);
        let codes = _mm512_or_si512(
            _mm512_and_si512(_mm512_srli_epi16::<4>(bytes), low),
            high_of_high,
        );
        sum = add_products(
            sum,
            codes,
            act.codes[half * 2 + 1],
            scales,
            groups_of_16(group + 4, group + 6),
        );
    }
    let sum = take_off::<5>(sum, _mm256_madd_epi16(scales, act.sums));
    _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scale(block.d, act.scale), acc)
});
