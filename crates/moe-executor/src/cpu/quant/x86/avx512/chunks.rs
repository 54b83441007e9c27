//! Formats whose activations have a scale per 32 elements (Q8_0, Q8_1), in steps of 64 elements.
//!
//! VNNI multiplies unsigned with signed bytes. An offset makes the codes unsigned, and the sum starts at minus the offset
//! times the activations to compensate.

use std::arch::x86_64::*;

use super::Steps;
use crate::cpu::quant::activation::Q8Row;
use crate::cpu::quant::format::{F16, Format};
use crate::cpu::quant::fp4::{E2M1_DOUBLED, E8M0_HALVED, Mxfp4, Nvfp4, UE4M3_HALVED};
use crate::cpu::quant::iq4::{IQ4_VALUES, Iq4Nl};
use crate::cpu::quant::legacy::{Q4_0, Q4_1, Q5_0, Q5_1, Q8_0};

/// 64 elements: one or two blocks.
///
/// # Safety
/// All methods require that the CPU has the instructions of [`Steps`], and that the blocks of 64 elements can be read from
/// `blocks` on.
trait Chunk: Format {
    /// Added to the codes of [`Format::decode_codes`].
    const OFFSET: u8;

    /// The codes plus [`Chunk::OFFSET`], in the order of the elements.
    unsafe fn codes(blocks: *const Self) -> __m512i;

    /// The scale of each four elements.
    unsafe fn scales(blocks: *const Self) -> __m512;

    /// Writes the scales like [`Steps::decode_scales_of_16`].
    unsafe fn write_scales_of_16(blocks: [&Self; 16], scale: *mut __m512);

    /// The minima of sixteen blocks.
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    #[inline]
    unsafe fn minima_of_16(_blocks: [&Self; 16]) -> __m512 {
        _mm512_setzero_ps()
    }

    /// The negated minimum of each block of 32 elements in its first lane, 0 in the other lanes.
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    #[inline]
    unsafe fn minima(_blocks: *const Self) -> __m512 {
        _mm512_setzero_ps()
    }
}

/// 64 activations.
#[derive(Clone, Copy)]
pub struct Activations {
    codes: __m512i,
    /// Minus the offset times the sum of each four codes.
    start: __m512i,
    /// The scale of each four activations.
    scales: __m512,
    /// Scale times sum of the codes, the same in all lanes of a block of 32.
    scaled_sums: __m512,
}

impl<F: Chunk> Steps for F {
    const STEP: usize = 64;
    type Activations<'a> = Activations;

    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    #[inline]
    unsafe fn load<'a>(act: &Q8Row<'a>, step: usize) -> Activations {
        // SAFETY: by the contract of this function, `act` has 64 codes, two scales and, with minima, two sums for the step.
        unsafe {
            let codes = _mm512_loadu_si512(act.q.as_ptr().add(step * 64).cast());
            let zero = _mm512_setzero_si512();
            let start = match F::OFFSET {
                0 => zero,
                offset => _mm512_sub_epi32(
                    zero,
                    _mm512_dpbusd_epi32(zero, _mm512_set1_epi8(offset as i8), codes),
                ),
            };
            let scales = two_floats(act.scale.as_ptr().add(step * 2).cast());
            let scaled_sums = if F::MIN {
                two_floats(act.scaled_sum.as_ptr().add(step * 2).cast())
            } else {
                _mm512_setzero_ps()
            };
            Activations {
                codes,
                start,
                scales,
                scaled_sums,
            }
        }
    }

    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    #[inline]
    unsafe fn step(blocks: *const F, act: &Activations, acc: __m512) -> __m512 {
        // SAFETY: by the contract of this function.
        unsafe {
            let sums = _mm512_dpbusd_epi32(act.start, F::codes(blocks), act.codes);
            let scales = _mm512_mul_ps(F::scales(blocks), act.scales);
            let acc = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums), scales, acc);
            if F::MIN {
                _mm512_fmadd_ps(F::minima(blocks), act.scaled_sums, acc)
            } else {
                acc
            }
        }
    }

    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    #[inline]
    unsafe fn decode(blocks: *const F, q: *mut i8) {
        // SAFETY: by the contract of this function.
        unsafe {
            let codes = _mm512_sub_epi8(F::codes(blocks), _mm512_set1_epi8(F::OFFSET as i8));
            _mm512_storeu_si512(q.cast(), codes);
        }
    }

    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    #[inline]
    unsafe fn decode_scales_of_16(blocks: [&F; 16], scale: *mut __m512, min: *mut __m512) {
        // SAFETY: by the contract of this function.
        unsafe {
            F::write_scales_of_16(blocks, scale);
            if F::MIN {
                min.write(F::minima_of_16(blocks));
            }
        }
    }
}

/// Two floats, each broadcast to half of the lanes.
///
/// # Safety
/// Two floats can be read at `at`.
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
unsafe fn two_floats(at: *const f32) -> __m512 {
    // SAFETY: two floats can be read, by the contract of this function.
    let both = unsafe { _mm512_castsi512_ps(_mm512_castsi128_si512(_mm_loadl_epi64(at.cast()))) };
    _mm512_permutexvar_ps(
        _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0),
        both,
    )
}

/// Two half-precision numbers, each broadcast to half of the lanes.
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
fn two_halves(first: F16, second: F16) -> __m512 {
    let first = _mm256_set1_epi16(first.bits() as i16);
    _mm512_cvtph_ps(_mm256_mask_set1_epi16(first, 0xff00, second.bits() as i16))
}

/// Sixteen half-precision numbers.
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
fn sixteen_halves(numbers: [F16; 16]) -> __m512 {
    let bits = numbers.map(F16::bits);
    // SAFETY: the array has 32 bytes.
    _mm512_cvtph_ps(unsafe { _mm256_loadu_si256(bits.as_ptr().cast()) })
}

/// Two half-precision numbers, in lanes 0 and 8.
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
fn two_halves_apart(first: F16, second: F16) -> __m512 {
    let first = _mm256_maskz_set1_epi16(0x0001, first.bits() as i16);
    _mm512_cvtph_ps(_mm256_mask_set1_epi16(first, 0x0100, second.bits() as i16))
}

/// The 4-bit codes of two blocks: the low halves of the first, its high halves, the low halves of the second, its high halves.
///
/// # Safety
/// Both blocks can be read.
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
unsafe fn nibbles(first: *const [u8; 16], second: *const [u8; 16]) -> __m512i {
    // SAFETY: both blocks can be read, by the contract of this function.
    let both = unsafe {
        let first = _mm512_broadcast_i32x4(_mm_loadu_si128(first.cast()));
        _mm512_mask_broadcast_i32x4(first, 0xff00, _mm_loadu_si128(second.cast()))
    };
    let shift = _mm512_set_epi64(4, 4, 0, 0, 4, 4, 0, 0);
    _mm512_and_si512(_mm512_srlv_epi64(both, shift), _mm512_set1_epi8(15))
}

/// Adds 16 to the codes whose bit of `first` or `second` (the `qh` of two blocks) is set.
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
fn add_fifth_bits(codes: __m512i, first: [u8; 4], second: [u8; 4]) -> __m512i {
    let bits = u64::from(u32::from_le_bytes(first)) | u64::from(u32::from_le_bytes(second)) << 32;
    _mm512_mask_add_epi8(codes, bits, codes, _mm512_set1_epi8(16))
}

/// Looks up 4-bit codes in a table and adds `offset`.
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
pub fn look_up(table: &'static [i8; 16], offset: u8, codes: __m512i) -> __m512i {
    // SAFETY: the table has 16 bytes.
    let table = unsafe { _mm_loadu_si128(table.as_ptr().cast()) };
    let table = _mm_add_epi8(table, _mm_set1_epi8(offset as i8));
    _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), codes)
}

/// Implements [`Chunk`] for blocks of 32 elements with a half-precision scale `d` and optionally a minimum.
macro_rules! chunk_of_two {
    ($format:ty, offset $offset:expr, |$first:ident, $second:ident| $codes:expr $(, minima $m:ident)?) => {
        impl Chunk for $format {
            const OFFSET: u8 = $offset;

            #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
            #[inline]
            unsafe fn codes(blocks: *const Self) -> __m512i {
                // SAFETY: two blocks can be read, by the contract of this function.
                unsafe {
                    let ($first, $second) = (&*blocks, &*blocks.add(1));
                    $codes
                }
            }

            #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
            #[inline]
            unsafe fn scales(blocks: *const Self) -> __m512 {
                // SAFETY: two blocks can be read, by the contract of this function.
                unsafe { two_halves((*blocks).d, (*blocks.add(1)).d) }
            }

            #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
            #[inline]
            unsafe fn write_scales_of_16(blocks: [&Self; 16], scale: *mut __m512) {
                // SAFETY: by the contract of this function.
                unsafe { scale.write(sixteen_halves(blocks.map(|block| block.d))) }
            }

            $(#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
            #[inline]
            unsafe fn minima(blocks: *const Self) -> __m512 {
                // SAFETY: two blocks can be read, by the contract of this function.
                unsafe { two_halves_apart((*blocks).$m, (*blocks.add(1)).$m) }
            }

            #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
            #[inline]
            unsafe fn minima_of_16(blocks: [&Self; 16]) -> __m512 {
                // Negated: `m` is added, minima are subtracted.
                _mm512_xor_ps(sixteen_halves(blocks.map(|block| block.$m)), _mm512_set1_ps(-0.0))
            })?
        }
    };
}

chunk_of_two!(Q4_0, offset 8, |a, b| nibbles(&a.qs, &b.qs));
chunk_of_two!(Q4_1, offset 0, |a, b| nibbles(&a.qs, &b.qs), minima m);
chunk_of_two!(Q5_0, offset 16, |a, b| add_fifth_bits(nibbles(&a.qs, &b.qs), a.qh, b.qh));
chunk_of_two!(Q5_1, offset 0, |a, b| add_fifth_bits(nibbles(&a.qs, &b.qs), a.qh, b.qh), minima m);
chunk_of_two!(Q8_0, offset 128, |a, b| {
    let first = _mm256_loadu_si256(a.qs.as_ptr().cast());
    let second = _mm256_loadu_si256(b.qs.as_ptr().cast());
    let both = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(first), second);
    _mm512_xor_si512(both, _mm512_set1_epi8(-128))
});

chunk_of_two!(Iq4Nl, offset 128, |a, b| look_up(&IQ4_VALUES, 128, nibbles(&a.qs, &b.qs)));

impl Chunk for Mxfp4 {
    const OFFSET: u8 = 12;

    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    #[inline]
    unsafe fn codes(blocks: *const Mxfp4) -> __m512i {
        // SAFETY: two blocks can be read, by the contract of this function.
        unsafe {
            look_up(
                &E2M1_DOUBLED,
                Self::OFFSET,
                nibbles(&(*blocks).qs, &(*blocks.add(1)).qs),
            )
        }
    }

    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    #[inline]
    unsafe fn scales(blocks: *const Mxfp4) -> __m512 {
        // SAFETY: two blocks can be read, by the contract of this function.
        let (first, second) = unsafe { ((*blocks).e, (*blocks.add(1)).e) };
        let (first, second) = (
            E8M0_HALVED[usize::from(first)],
            E8M0_HALVED[usize::from(second)],
        );
        _mm512_mask_broadcastss_ps(_mm512_set1_ps(first), 0xff00, _mm_set_ss(second))
    }

    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    #[inline]
    unsafe fn write_scales_of_16(blocks: [&Mxfp4; 16], scale: *mut __m512) {
        // SAFETY: by the contract of this function.
        unsafe {
            scale
                .cast::<[f32; 16]>()
                .write(blocks.map(|block| E8M0_HALVED[usize::from(block.e)]))
        }
    }
}

impl Chunk for Nvfp4 {
    const OFFSET: u8 = 12;

    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    #[inline]
    unsafe fn codes(block: *const Nvfp4) -> __m512i {
        // SAFETY: a block can be read, by the contract of this function.
        let bytes = unsafe { _mm256_loadu_si256((&raw const (*block).qs).cast()) };
        // The low halves of each eight bytes belong to the first eight elements of a group, the high halves to the others.
        let twice = _mm512_set_epi64(3, 3, 2, 2, 1, 1, 0, 0);
        let twice = _mm512_permutexvar_epi64(twice, _mm512_castsi256_si512(bytes));
        let nibbles = _mm512_srlv_epi64(twice, _mm512_set_epi64(4, 0, 4, 0, 4, 0, 4, 0));
        look_up(
            &E2M1_DOUBLED,
            Self::OFFSET,
            _mm512_and_si512(nibbles, _mm512_set1_epi8(15)),
        )
    }

    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    #[inline]
    unsafe fn scales(block: *const Nvfp4) -> __m512 {
        // SAFETY: a block can be read, by the contract of this function.
        let d = unsafe { (*block).d };
        let [a, b, c, d] = d.map(|d| UE4M3_HALVED[usize::from(d)]);
        _mm512_set_ps(d, d, d, d, c, c, c, c, b, b, b, b, a, a, a, a)
    }

    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    #[inline]
    unsafe fn write_scales_of_16(blocks: [&Nvfp4; 16], scale: *mut __m512) {
        for group in 0..4 {
            let scales = blocks.map(|block| UE4M3_HALVED[usize::from(block.d[group])]);
            // SAFETY: by the contract of this function.
            unsafe { scale.add(group * 2).cast::<[f32; 16]>().write(scales) }
        }
    }
}
