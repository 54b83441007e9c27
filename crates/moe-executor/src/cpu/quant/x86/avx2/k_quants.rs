//! Super-blocks with integer scales per group: K-quants and TQ2_0, 32 elements at a time.
//!
//! Products of two neighboring elements are added in 16 bits, which their range does not exceed, and multiplied by the integer
//! scale of the group into 32 bits. The sum over a super-block is an exact integer, which is then multiplied by the
//! floating-point scales.

use std::arch::x86_64::*;

use super::{Steps, load_16, load_32, widen};
use crate::cpu::quant::activation::Q8Row;
use crate::cpu::quant::format::{F16, Format, QK_K};
use crate::cpu::quant::k_quants::{Q2K, Q3K, Q4K, Q5K, Q6K, q3_k_scales, scales_and_mins};
use crate::cpu::quant::ternary::Tq2_0;

/// A super-block as eight vectors of codes.
///
/// # Safety
/// All unsafe methods require that the CPU has the instructions of [`Steps`].
trait SuperBlock: Format {
    /// Added to the codes of [`Format::decode_codes`] to make them unsigned; 0 for formats with minima.
    const OFFSET: i16 = 0;

    /// The codes of elements `32 * i` to `32 * i + 31`, plus the offset.
    unsafe fn vector(&self, i: usize) -> __m256i;

    /// The integer scales of the groups, 16 bits each.
    unsafe fn integer_scales(&self) -> __m256i;

    /// The factor of the integer scales.
    fn d(&self) -> F16;

    /// For formats with minima, the integer minimum of each sixteen elements, 16 bits each, and their factor.
    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    unsafe fn minima(&self) -> (__m256i, F16) {
        (_mm256_setzero_si256(), self.d())
    }
}

/// The activations of a super-block.
#[derive(Clone, Copy)]
pub struct Activations<'a> {
    codes: &'a [[i8; 32]; 8],
    /// The sum of each sixteen codes, 16 bits each.
    sums: __m256i,
    scale: f32,
}

/// [`Steps::load`].
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn load<'a>(act: &Q8Row<'a>, block: usize) -> Activations<'a> {
    // SAFETY: by the contract of `Steps::load`, `act` has 256 codes, 16 sums and a scale for the block.
    unsafe {
        Activations {
            codes: &*act.q.as_ptr().add(block * QK_K).cast(),
            sums: _mm256_loadu_si256(act.sum.as_ptr().add(block * 16).cast()),
            scale: act.scale.get_unchecked(block).get(),
        }
    }
}

/// [`Steps::step`].
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn step<F: SuperBlock>(block: &F, act: &Activations, acc: __m256) -> __m256 {
    // SAFETY: by the contract of this function.
    unsafe {
        let scales = block.integer_scales();
        let mut sum = _mm256_setzero_si256();
        for i in 0..8 {
            let pairs = _mm256_maddubs_epi16(block.vector(i), load_32(&act.codes[i]));
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, scales_of::<F>(scales, i)));
        }
        if F::OFFSET != 0 {
            let scales = _mm256_mullo_epi16(scales, _mm256_set1_epi16(F::OFFSET));
            sum = _mm256_sub_epi32(sum, _mm256_madd_epi16(scales, act.sums));
        }
        let acc = add_scaled(acc, sum, widen(block.d()) * act.scale);
        if !F::MIN {
            return acc;
        }
        let (mins, dmin) = block.minima();
        add_scaled(
            acc,
            _mm256_madd_epi16(mins, act.sums),
            -widen(dmin) * act.scale,
        )
    }
}

/// [`Steps::decode`].
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn decode<F: SuperBlock>(block: &F, q: &mut [i8; QK_K]) {
    let (parts, _) = q.as_chunks_mut::<32>();
    for (i, part) in parts.iter_mut().enumerate() {
        // SAFETY: by the contract of this function; the part has 32 bytes.
        unsafe {
            let vector = _mm256_sub_epi8(block.vector(i), _mm256_set1_epi8(F::OFFSET as i8));
            _mm256_storeu_si256(part.as_mut_ptr().cast(), vector);
        }
    }
}

/// The scales of elements `32 * i` to `32 * i + 31`; a lane of 16 bits belongs to two elements.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn scales_of<F: Format>(scales: __m256i, i: usize) -> __m256i {
    let first = i * 32 / F::GROUP;
    let half = match first / 8 {
        0 => _mm256_castsi256_si128(scales),
        _ => _mm256_extracti128_si256::<1>(scales),
    };
    let bytes = |group: usize| _mm_set1_epi16(0x0100 + 0x0202 * (group % 8) as i16);
    let index = _mm256_set_m128i(bytes(first + 16 / F::GROUP), bytes(first));
    _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(half), index)
}

/// `acc + sum * scale`.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn add_scaled(acc: __m256, sum: __m256i, scale: f32) -> __m256 {
    _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), _mm256_set1_ps(scale), acc)
}

/// Zero-extends eight bytes to 16 bits.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn widen_8(bytes: [u8; 8]) -> __m128i {
    _mm_cvtepu8_epi16(_mm_cvtsi64_si128(i64::from_le_bytes(bytes)))
}

/// Zero-extends eight bytes to 16 bits, each twice.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn widen_8_twice(bytes: [u8; 8]) -> __m256i {
    let once = widen_8(bytes);
    _mm256_set_m128i(
        _mm_unpackhi_epi16(once, once),
        _mm_unpacklo_epi16(once, once),
    )
}

/// `(byte >> first) & mask` of each byte; `mask` must exclude bits that cross from the neighboring byte. `first` is a constant
/// after inlining.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn bits(v: __m256i, first: usize, mask: i8) -> __m256i {
    _mm256_and_si256(
        _mm256_srl_epi16(v, _mm_cvtsi32_si128(first as i32)),
        _mm256_set1_epi8(mask),
    )
}

/// Sets each byte to `value` if `bit` of it is set, else to 0.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn where_bit(v: __m256i, bit: usize, value: i8) -> __m256i {
    let mask = _mm256_set1_epi8((1u8 << bit) as i8);
    let set = _mm256_cmpeq_epi8(_mm256_and_si256(v, mask), mask);
    _mm256_and_si256(set, _mm256_set1_epi8(value))
}

macro_rules! super_block {
    (
        $format:ty $(, offset $offset:expr)?, |$block:ident|
        vector($i:ident) $vector:expr, scales $scales:expr $(, minima $minima:expr)?
    ) => {
        impl Steps for $format {
            type Activations<'a> = Activations<'a>;

            #[target_feature(enable = "avx2,fma,f16c")]
            #[inline]
            unsafe fn load<'a>(act: &Q8Row<'a>, block: usize) -> Activations<'a> {
                // SAFETY: by the contract of this function.
                unsafe { load(act, block) }
            }

            #[target_feature(enable = "avx2,fma,f16c")]
            #[inline]
            unsafe fn step(block: &Self, act: &Activations, acc: __m256) -> __m256 {
                // SAFETY: by the contract of this function.
                unsafe { step(block, act, acc) }
            }

            #[target_feature(enable = "avx2,fma,f16c")]
            #[inline]
            unsafe fn decode(&self, q: &mut [i8; QK_K]) {
                // SAFETY: by the contract of this function.
                unsafe { decode(self, q) }
            }
        }

        impl SuperBlock for $format {
            $(const OFFSET: i16 = $offset;)?

            #[target_feature(enable = "avx2,fma,f16c")]
            #[inline]
            unsafe fn vector(&self, $i: usize) -> __m256i {
                let $block = self;
                $vector
            }

            #[target_feature(enable = "avx2,fma,f16c")]
            #[inline]
            unsafe fn integer_scales(&self) -> __m256i {
                let $block = self;
                $scales
            }

            #[inline(always)]
            fn d(&self) -> F16 {
                self.d
            }

            $(#[target_feature(enable = "avx2,fma,f16c")]
            #[inline]
            unsafe fn minima(&self) -> (__m256i, F16) {
                let $block = self;
                ($minima, self.dmin)
            })?
        }
    };
}

super_block!(Q2K, |block|
    vector(i) bits(load_32(&block.qs.as_chunks().0[i / 4]), i % 4 * 2, 3),
    scales _mm256_cvtepu8_epi16(_mm_and_si128(load_16(&block.scales), _mm_set1_epi8(15))),
    minima {
        let upper = _mm_srli_epi16::<4>(load_16(&block.scales));
        _mm256_cvtepu8_epi16(_mm_and_si128(upper, _mm_set1_epi8(15)))
    }
);

super_block!(Q3K, offset 4, |block|
    vector(i) {
        let low = bits(load_32(&block.qs.as_chunks().0[i / 4]), i % 4 * 2, 3);
        _mm256_or_si256(low, where_bit(load_32(&block.hmask), i, 4))
    },
    scales {
        let scales = _mm256_cvtepu8_epi16(load_16(&q3_k_scales(&block.scales)));
        _mm256_sub_epi16(scales, _mm256_set1_epi16(32))
    }
);

super_block!(Q4K, |block|
    vector(i) bits(load_32(&block.qs.as_chunks().0[i / 2]), i % 2 * 4, 15),
    scales _mm256_castsi128_si256(widen_8(scales_and_mins(&block.scales).0)),
    minima widen_8_twice(scales_and_mins(&block.scales).1)
);

super_block!(Q5K, |block|
    vector(i) {
        let low = bits(load_32(&block.qs.as_chunks().0[i / 2]), i % 2 * 4, 15);
        _mm256_or_si256(low, where_bit(load_32(&block.qh), i, 16))
    },
    scales _mm256_castsi128_si256(widen_8(scales_and_mins(&block.scales).0)),
    minima widen_8_twice(scales_and_mins(&block.scales).1)
);

super_block!(Q6K, offset 32, |block|
    vector(i) {
        // 64 bytes of `ql` have the low four bits of 128 elements, 32 bytes of `qh` their upper two bits.
        let low = bits(load_32(&block.ql.as_chunks().0[i / 4 * 2 + i % 2]), i % 4 / 2 * 4, 15);
        let high = bits(load_32(&block.qh.as_chunks().0[i / 4]), i % 4 * 2, 3);
        _mm256_or_si256(low, _mm256_slli_epi16::<4>(high))
    },
    scales _mm256_cvtepi8_epi16(load_16(&block.scales))
);

// One scale for the super-block; the codes are -1, 0 and 1.
super_block!(Tq2_0, offset 1, |block|
    vector(i) bits(load_32(&block.qs.as_chunks().0[i / 4]), i % 4 * 2, 3),
    scales {
        let _ = block;
        _mm256_set1_epi16(1)
    }
);
