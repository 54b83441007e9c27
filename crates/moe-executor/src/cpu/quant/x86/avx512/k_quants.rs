//! Super-blocks with integer scales per group: K-quants and TQ2_0.
//!
//! Products of two neighboring elements are added in 16 bits, which their range does not exceed, and multiplied by the integer
//! scale of the group into 32 bits. The sum over a super-block is an exact integer, which is then multiplied by the
//! floating-point scales.

use std::arch::x86_64::*;

use super::Steps;
use super::transpose::transpose;
use crate::cpu::quant::activation::Q8Row;
use crate::cpu::quant::format::{F16, Format, QK_K};
use crate::cpu::quant::k_quants::{Q2K, Q3K, Q4K, Q5K, Q6K, q3_k_scales, scales_and_mins};
use crate::cpu::quant::ternary::Tq2_0;

/// A super-block as four vectors of codes.
///
/// # Safety
/// All unsafe methods require that the CPU has the instructions of [`Steps`].
trait SuperBlock: Format {
    /// The first element of each half of each vector.
    const ORDER: [[usize; 2]; 4];
    /// Added to the codes of [`Format::decode_codes`] to make them unsigned; 0 for formats with minima.
    const OFFSET: i16 = 0;

    /// The codes of vector `i`, plus the offset.
    unsafe fn vector(&self, i: usize) -> __m512i;

    /// The integer scales of the groups, 16 bits each.
    unsafe fn integer_scales(&self) -> __m256i;

    /// The factor of the integer scales.
    fn d(&self) -> F16;

    /// For formats with minima, the integer minimum of each sixteen elements, 16 bits each, and their factor.
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    #[inline]
    unsafe fn minima(&self) -> (__m256i, F16) {
        (_mm256_setzero_si256(), self.d())
    }
}

/// The order of the elements.
const IN_ORDER: [[usize; 2]; 4] = [[0, 32], [64, 96], [128, 160], [192, 224]];
/// The low halves of 64 bytes, then their high halves: 32 bytes have 32 elements in their low halves and the next 32 in their
/// high halves.
const BY_NIBBLE: [[usize; 2]; 4] = [[0, 64], [32, 96], [128, 192], [160, 224]];
/// The corresponding 32 elements of both halves of the super-block.
const BY_HALF: [[usize; 2]; 4] = [[0, 128], [32, 160], [64, 192], [96, 224]];

/// The activations of a super-block.
#[derive(Clone, Copy)]
pub struct Activations {
    codes: [__m512i; 4],
    /// The sum of each sixteen codes, 16 bits each.
    sums: __m256i,
    scale: f32,
}

/// [`Steps::load`].
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
unsafe fn load<F: SuperBlock>(act: &Q8Row, step: usize) -> Activations {
    // SAFETY: by the contract of `Steps::load`, `act` has 256 codes, 16 sums and a scale for the step.
    unsafe {
        let first = act.q.as_ptr().add(step * QK_K);
        let mut codes = [_mm512_setzero_si512(); 4];
        for (codes, [low, high]) in codes.iter_mut().zip(F::ORDER) {
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

/// [`Steps::step`].
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
unsafe fn step<F: SuperBlock>(block: *const F, act: &Activations, acc: __m512) -> __m512 {
    // SAFETY: by the contract of this function.
    unsafe {
        let block = &*block;
        let scales = block.integer_scales();
        let mut sum = _mm512_setzero_si512();
        for i in 0..4 {
            let index = groups::<F>(F::ORDER[i]);
            let scales = _mm512_permutexvar_epi16(index, _mm512_castsi256_si512(scales));
            sum = _mm512_dpwssd_epi32(
                sum,
                _mm512_maddubs_epi16(block.vector(i), act.codes[i]),
                scales,
            );
        }
        if F::OFFSET != 0 {
            let scales = _mm256_mullo_epi16(scales, _mm256_set1_epi16(F::OFFSET));
            let share = _mm256_madd_epi16(scales, act.sums);
            sum = _mm512_sub_epi32(sum, _mm512_zextsi256_si512(share));
        }
        let acc = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scale(block.d(), act.scale), acc);
        if !F::MIN {
            return acc;
        }
        let (mins, dmin) = block.minima();
        let minima = _mm256_cvtepi32_ps(_mm256_madd_epi16(mins, act.sums));
        _mm512_fnmadd_ps(_mm512_zextps256_ps512(minima), scale(dmin, act.scale), acc)
    }
}

/// [`Steps::decode`].
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
unsafe fn decode<F: SuperBlock>(block: *const F, q: *mut i8) {
    // SAFETY: by the contract of this function.
    unsafe {
        for i in 0..4 {
            let vector = _mm512_sub_epi8((*block).vector(i), _mm512_set1_epi8(F::OFFSET as i8));
            let [low, high] = F::ORDER[i];
            _mm256_storeu_si256(q.add(low).cast(), _mm512_castsi512_si256(vector));
            _mm256_storeu_si256(q.add(high).cast(), _mm512_extracti64x4_epi64::<1>(vector));
        }
    }
}

/// [`Steps::decode_scales_of_16`].
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
unsafe fn decode_scales_of_16<F: SuperBlock>(
    blocks: [&F; 16],
    scale: *mut __m512,
    min: *mut __m512,
) {
    // SAFETY: by the contract of this function.
    unsafe {
        let mut scales = [_mm512_setzero_si512(); 16];
        for (scales, block) in scales.iter_mut().zip(blocks) {
            *scales = _mm512_castps_si512(times(block.integer_scales(), block.d()));
        }
        let scales = transpose(scales);
        for i in 0..QK_K / F::GROUP {
            scale.add(i * 2).write(_mm512_castsi512_ps(scales[i]));
        }
        if F::MIN {
            let mut mins = [_mm512_setzero_si512(); 16];
            for (mins, block) in mins.iter_mut().zip(blocks) {
                let (integers, dmin) = block.minima();
                *mins = _mm512_castps_si512(times(integers, dmin));
            }
            let mins = transpose(mins);
            for i in 0..QK_K / F::GROUP {
                min.add(i * 2)
                    .write(_mm512_castsi512_ps(mins[i * F::GROUP / 16]));
            }
        }
    }
}

/// Sixteen integers times a half-precision number.
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
fn times(integers: __m256i, d: F16) -> __m512 {
    _mm512_mul_ps(
        _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(integers)),
        scale(d, 1.0),
    )
}

/// The index of the group of each 16-bit lane, for a vector whose halves start at elements `low` and `high`.
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
fn groups<F: Format>([low, high]: [usize; 2]) -> __m512i {
    let first = |start: usize| _mm256_set1_epi16((start / F::GROUP) as i16);
    let groups = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(first(low)), first(high));
    match F::GROUP {
        // Sixteen lanes of two elements are one group of 32 or two groups of 16.
        32 => groups,
        _ => _mm512_sub_epi16(groups, _mm512_set_epi64(!0, !0, 0, 0, !0, !0, 0, 0)),
    }
}

/// A half-precision number times `factor`, broadcast to all lanes.
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
fn scale(d: F16, factor: f32) -> __m512 {
    let d = _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(d.bits()))));
    _mm512_set1_ps(d * factor)
}

/// Zero-extends eight bytes to 16 bits.
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
fn widen_8(bytes: [u8; 8]) -> __m256i {
    _mm256_castsi128_si256(_mm_cvtepu8_epi16(_mm_cvtsi64_si128(i64::from_le_bytes(
        bytes,
    ))))
}

/// Zero-extends eight bytes to 16 bits, each twice.
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
fn widen_8_twice(bytes: [u8; 8]) -> __m256i {
    let twice = _mm256_set_epi16(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
    _mm256_permutexvar_epi16(twice, widen_8(bytes))
}

/// Loads sixteen bytes.
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
fn load_16<T>(bytes: &[T; 16]) -> __m128i {
    const { assert!(size_of::<T>() == 1) };
    // SAFETY: the array has 16 bytes.
    unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) }
}

/// Loads 32 bytes into both halves.
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
fn load_32_twice(bytes: &[u8; 32]) -> __m512i {
    // SAFETY: the array has 32 bytes.
    unsafe { _mm512_broadcast_i64x4(_mm256_loadu_si256(bytes.as_ptr().cast())) }
}

/// Loads 64 bytes.
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
fn load_64(bytes: &[u8; 64]) -> __m512i {
    // SAFETY: the array has 64 bytes.
    unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
}

/// `(byte >> first) & mask` of each byte; `mask` must exclude bits that cross from the neighboring byte. `first` is a constant
/// after inlining.
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
fn bits(v: __m512i, first: usize, mask: i8) -> __m512i {
    _mm512_and_si512(
        _mm512_srl_epi16(v, _mm_cvtsi32_si128(first as i32)),
        _mm512_set1_epi8(mask),
    )
}

/// Adds `value` to each code whose byte of `bytes` has a bit set: bit `low` in the lower half of the vector, bit `high` in the
/// upper half.
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
fn add_where(codes: __m512i, bytes: __m512i, low: usize, high: usize, value: i8) -> __m512i {
    let (low, high) = (
        _mm256_set1_epi8((1u8 << low) as i8),
        _mm256_set1_epi8((1u8 << high) as i8),
    );
    let mask = _mm512_test_epi8_mask(
        bytes,
        _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high),
    );
    _mm512_mask_add_epi8(codes, mask, codes, _mm512_set1_epi8(value))
}

macro_rules! super_block {
    (
        $format:ty, $order:ident $(, offset $offset:expr)?, |$block:ident|
        vector($i:ident) $vector:expr, scales $scales:expr $(, minima $minima:expr)?
    ) => {
        impl Steps for $format {
            const STEP: usize = QK_K;
            type Activations<'a> = Activations;

            #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
            #[inline]
            unsafe fn load<'a>(act: &Q8Row<'a>, step: usize) -> Activations {
                // SAFETY: by the contract of this function.
                unsafe { load::<Self>(act, step) }
            }

            #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
            #[inline]
            unsafe fn step(block: *const Self, act: &Activations, acc: __m512) -> __m512 {
                // SAFETY: by the contract of this function.
                unsafe { step(block, act, acc) }
            }

            #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
            #[inline]
            unsafe fn decode(block: *const Self, q: *mut i8) {
                // SAFETY: by the contract of this function.
                unsafe { decode(block, q) }
            }

            #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
            #[inline]
            unsafe fn decode_scales_of_16(blocks: [&Self; 16], scale: *mut __m512, min: *mut __m512) {
                // SAFETY: by the contract of this function.
                unsafe { decode_scales_of_16(blocks, scale, min) }
            }
        }

        impl SuperBlock for $format {
            const ORDER: [[usize; 2]; 4] = $order;
            $(const OFFSET: i16 = $offset;)?

            #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
            #[inline]
            unsafe fn vector(&self, $i: usize) -> __m512i {
                let $block = self;
                $vector
            }

            #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
            #[inline]
            unsafe fn integer_scales(&self) -> __m256i {
                let $block = self;
                $scales
            }

            #[inline(always)]
            fn d(&self) -> F16 {
                self.d
            }

            $(#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
            #[inline]
            unsafe fn minima(&self) -> (__m256i, F16) {
                let $block = self;
                ($minima, self.dmin)
            })?
        }
    };
}

super_block!(Q2K, BY_HALF, |block|
    vector(i) bits(load_64(&block.qs), 2 * i, 3),
    scales _mm256_cvtepu8_epi16(_mm_and_si128(load_16(&block.scales), _mm_set1_epi8(15))),
    minima {
        let upper = _mm_srli_epi16::<4>(load_16(&block.scales));
        _mm256_cvtepu8_epi16(_mm_and_si128(upper, _mm_set1_epi8(15)))
    }
);

super_block!(Q3K, BY_HALF, offset 4, |block|
    vector(i) add_where(bits(load_64(&block.qs), 2 * i, 3), load_32_twice(&block.hmask), i, i + 4, 4),
    scales {
        let scales = _mm256_cvtepu8_epi16(load_16(&q3_k_scales(&block.scales)));
        _mm256_sub_epi16(scales, _mm256_set1_epi16(32))
    }
);

super_block!(Q4K, BY_NIBBLE, |block|
    vector(i) bits(load_64(&block.qs.as_chunks().0[i / 2]), i % 2 * 4, 15),
    scales widen_8(scales_and_mins(&block.scales).0),
    minima widen_8_twice(scales_and_mins(&block.scales).1)
);

super_block!(Q5K, BY_NIBBLE, |block|
    vector(i) {
        let low = bits(load_64(&block.qs.as_chunks().0[i / 2]), i % 2 * 4, 15);
        // The fifth bits of a group are the bits of `qh` with the index of the group.
        let group = i / 2 * 4 + i % 2;
        add_where(low, load_32_twice(&block.qh), group, group + 2, 16)
    },
    scales widen_8(scales_and_mins(&block.scales).0),
    minima widen_8_twice(scales_and_mins(&block.scales).1)
);

super_block!(Q6K, IN_ORDER, offset 32, |block|
    vector(i) {
        let low = bits(load_64(&block.ql.as_chunks().0[i / 2]), i % 2 * 4, 15);
        // Each byte of `qh` has two bits of four elements; this vector uses two adjacent pairs of bits.
        let high = bits(load_32_twice(&block.qh.as_chunks().0[i / 2]), i % 2 * 4, 15);
        let in_place = _mm512_sllv_epi64(high, _mm512_set_epi64(2, 2, 2, 2, 4, 4, 4, 4));
        _mm512_or_si512(low, _mm512_and_si512(in_place, _mm512_set1_epi8(0x30)))
    },
    scales _mm256_cvtepi8_epi16(load_16(&block.scales))
);

// One scale for the super-block; the codes are -1, 0 and 1.
super_block!(Tq2_0, BY_HALF, offset 1, |block|
    vector(i) bits(load_64(&block.qs), 2 * i, 3),
    scales {
        let _ = block;
        _mm256_set1_epi16(1)
    }
);
