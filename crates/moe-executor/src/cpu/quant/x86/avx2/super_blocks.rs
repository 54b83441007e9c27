//! Super-blocks of 256 elements, 32 at a time in their order.
//!
//! Products of neighbouring elements are added in 16 bits, which their ranges fit, and multiplied by the group's integer
//! scale into 32 bits; a super-block is one exact integer sum before it meets a floating-point scale.

use std::arch::x86_64::*;

use super::{Steps, load_16, load_32, widen};
use crate::cpu::quant::activation::Q8Row;
use crate::cpu::quant::format::QK_K;
use crate::cpu::quant::k_quants::{Q2K, Q3K, Q4K, Q5K, Q6K, q3_k_scales, scales_and_mins};

/// The activations of a super-block.
#[derive(Clone, Copy)]
pub struct Activations<'a> {
    codes: &'a [[i8; 32]; 8],
    /// The sum of each sixteen codes, 16 bits.
    sums: __m256i,
    scale: f32,
}

/// Sixteen group scales of 16 bits, from which those of 32 elements are picked.
struct Scales([__m256i; 2]);

impl Scales {
    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    fn new(scales: __m256i) -> Scales {
        let (first, second) = (
            _mm256_castsi256_si128(scales),
            _mm256_extracti128_si256::<1>(scales),
        );
        Scales([
            _mm256_broadcastsi128_si256(first),
            _mm256_broadcastsi128_si256(second),
        ])
    }

    /// Eight copies each of the scales of groups `2 * i` and `2 * i + 1`.
    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    fn of_16(&self, i: usize) -> __m256i {
        let first = 0x0100 + 0x0404 * (i as i16 % 4);
        let index = _mm256_set_m128i(_mm_set1_epi16(first + 0x0202), _mm_set1_epi16(first));
        _mm256_shuffle_epi8(self.0[i / 4], index)
    }

    /// Sixteen copies of the scale of group `i`, of which there are eight.
    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    fn of_32(&self, i: usize) -> __m256i {
        _mm256_shuffle_epi8(self.0[0], _mm256_set1_epi16(0x0100 + 0x0202 * i as i16))
    }
}

/// `sum + codes · act * scales`.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn add_products(sum: __m256i, codes: __m256i, act: &[i8; 32], scales: __m256i) -> __m256i {
    let pairs = _mm256_maddubs_epi16(codes, load_32(act));
    _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, scales))
}

/// `acc + sum * scale`.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn add_scaled(acc: __m256, sum: __m256i, scale: f32) -> __m256 {
    _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), _mm256_set1_ps(scale), acc)
}

/// Eight scales and eight minima times the sums of the activations.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn scales_and_minima(packed: &[u8; 12], sums: __m256i) -> (Scales, __m256i) {
    let (scales, mins) = scales_and_mins(packed);
    let widen = |bytes: [u8; 8]| _mm_cvtepu8_epi16(_mm_cvtsi64_si128(i64::from_le_bytes(bytes)));
    let mins = widen(mins);
    // Each minimum belongs to two sums of sixteen.
    let mins = _mm256_set_m128i(
        _mm_unpackhi_epi16(mins, mins),
        _mm_unpacklo_epi16(mins, mins),
    );
    (
        Scales::new(_mm256_castsi128_si256(widen(scales))),
        _mm256_madd_epi16(mins, sums),
    )
}

/// Shifts 16 bits by a number of bits that is known when this is compiled.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn shift_right(v: __m256i, bits: usize) -> __m256i {
    _mm256_srl_epi16(v, _mm_cvtsi32_si128(bits as i32))
}

/// `add` in the bytes of which a bit is set.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn where_bit(v: __m256i, bit: usize, add: i8) -> __m256i {
    let mask = _mm256_set1_epi8((1u8 << bit) as i8);
    let set = _mm256_cmpeq_epi8(_mm256_and_si256(v, mask), mask);
    _mm256_and_si256(set, _mm256_set1_epi8(add))
}

macro_rules! super_block {
    ($format:ty, |$block:ident, $act:ident, $acc:ident| $body:expr) => {
        impl Steps for $format {
            type Activations<'a> = Activations<'a>;

            #[target_feature(enable = "avx2,fma,f16c")]
            #[inline]
            unsafe fn load<'a>(act: &Q8Row<'a>, block: usize) -> Activations<'a> {
                // SAFETY: the activations have 256 codes, 16 sums and a scale for each block.
                unsafe {
                    Activations {
                        codes: &*act.q.as_ptr().add(block * QK_K).cast(),
                        sums: _mm256_loadu_si256(act.sum.as_ptr().add(block * 16).cast()),
                        scale: act.scale.get_unchecked(block).get(),
                    }
                }
            }

            #[target_feature(enable = "avx2,fma,f16c")]
            #[inline]
            unsafe fn step($block: &$format, $act: &Activations, $acc: __m256) -> __m256 {
                $body
            }
        }
    };
}

super_block!(Q2K, |block, act, acc| {
    let (packed, low) = (load_16(&block.scales), _mm_set1_epi8(15));
    let scales = Scales::new(_mm256_cvtepu8_epi16(_mm_and_si128(packed, low)));
    let mins = _mm256_cvtepu8_epi16(_mm_and_si128(_mm_srli_epi16::<4>(packed), low));
    let (halves, _) = block.qs.as_chunks::<32>();
    let mut sum = _mm256_setzero_si256();
    for half in 0..2 {
        let bytes = load_32(&halves[half]);
        for part in 0..4 {
            let codes = _mm256_and_si256(shift_right(bytes, 2 * part), _mm256_set1_epi8(3));
            let i = half * 4 + part;
            sum = add_products(sum, codes, &act.codes[i], scales.of_16(i));
        }
    }
    let acc = add_scaled(acc, sum, widen(block.d) * act.scale);
    add_scaled(
        acc,
        _mm256_madd_epi16(mins, act.sums),
        -widen(block.dmin) * act.scale,
    )
});

super_block!(Q3K, |block, act, acc| {
    let scales = _mm256_cvtepu8_epi16(load_16(&q3_k_scales(&block.scales)));
    let scales = _mm256_sub_epi16(scales, _mm256_set1_epi16(32));
    let picked = Scales::new(scales);
    let high = load_32(&block.hmask);
    let (halves, _) = block.qs.as_chunks::<32>();
    let mut sum = _mm256_setzero_si256();
    for half in 0..2 {
        let bytes = load_32(&halves[half]);
        for part in 0..4 {
            let i = half * 4 + part;
            let codes = _mm256_and_si256(shift_right(bytes, 2 * part), _mm256_set1_epi8(3));
            let codes = _mm256_or_si256(codes, where_bit(high, i, 4));
            sum = add_products(sum, codes, &act.codes[i], picked.of_16(i));
        }
    }
    // The codes are 4 more than the weights.
    let sum = _mm256_sub_epi32(
        sum,
        _mm256_slli_epi32::<2>(_mm256_madd_epi16(scales, act.sums)),
    );
    add_scaled(acc, sum, widen(block.d) * act.scale)
});

super_block!(Q4K, |block, act, acc| {
    let (scales, minima) = scales_and_minima(&block.scales, act.sums);
    let (pairs, _) = block.qs.as_chunks::<32>();
    let low = _mm256_set1_epi8(15);
    let mut sum = _mm256_setzero_si256();
    for pair in 0..4 {
        let bytes = load_32(&pairs[pair]);
        for upper in 0..2 {
            let codes = _mm256_and_si256(shift_right(bytes, 4 * upper), low);
            let i = pair * 2 + upper;
            sum = add_products(sum, codes, &act.codes[i], scales.of_32(i));
        }
    }
    let acc = add_scaled(acc, sum, widen(block.d) * act.scale);
    add_scaled(acc, minima, -widen(block.dmin) * act.scale)
});

super_block!(Q5K, |block, act, acc| {
    let (scales, minima) = scales_and_minima(&block.scales, act.sums);
    let high = load_32(&block.qh);
    let (pairs, _) = block.qs.as_chunks::<32>();
    let low = _mm256_set1_epi8(15);
    let mut sum = _mm256_setzero_si256();
    for pair in 0..4 {
        let bytes = load_32(&pairs[pair]);
        for upper in 0..2 {
            let i = pair * 2 + upper;
            let codes = _mm256_and_si256(shift_right(bytes, 4 * upper), low);
            let codes = _mm256_or_si256(codes, where_bit(high, i, 16));
            sum = add_products(sum, codes, &act.codes[i], scales.of_32(i));
        }
    }
    let acc = add_scaled(acc, sum, widen(block.d) * act.scale);
    add_scaled(acc, minima, -widen(block.dmin) * act.scale)
});

super_block!(Q6K, |block, act, acc| {
    let scales = _mm256_cvtepi8_epi16(load_16(&block.scales));
    let picked = Scales::new(scales);
    let (low_parts, _) = block.ql.as_chunks::<32>();
    let (high_parts, _) = block.qh.as_chunks::<32>();
    let mut sum = _mm256_setzero_si256();
    for half in 0..2 {
        let high = load_32(&high_parts[half]);
        for part in 0..4 {
            let bytes = load_32(&low_parts[half * 2 + part % 2]);
            let codes = _mm256_and_si256(shift_right(bytes, part / 2 * 4), _mm256_set1_epi8(15));
            let upper = _mm256_slli_epi16::<4>(_mm256_and_si256(
                shift_right(high, 2 * part),
                _mm256_set1_epi8(3),
            ));
            let i = half * 4 + part;
            sum = add_products(
                sum,
                _mm256_or_si256(codes, upper),
                &act.codes[i],
                picked.of_16(i),
            );
        }
    }
    // The codes are 32 more than the weights.
    let sum = _mm256_sub_epi32(
        sum,
        _mm256_slli_epi32::<5>(_mm256_madd_epi16(scales, act.sums)),
    );
    add_scaled(acc, sum, widen(block.d) * act.scale)
});
