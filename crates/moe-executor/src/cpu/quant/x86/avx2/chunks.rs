//! Formats whose activations have a scale per 32 elements (Q8_0, Q8_1).
//!
//! AVX2 multiplies unsigned with signed bytes, so the sign of a code is moved to the activation.

use std::arch::x86_64::*;

use super::{Steps, load_16, load_32, widen};
use crate::cpu::quant::activation::Q8Row;
use crate::cpu::quant::format::{Format, QK_K};
use crate::cpu::quant::fp4::{E2M1_DOUBLED, E8M0_HALVED, Mxfp4, Nvfp4, UE4M3_HALVED};
use crate::cpu::quant::iq4::{IQ4_VALUES, Iq4Nl};
use crate::cpu::quant::legacy::{Q4_0, Q4_1, Q5_0, Q5_1, Q8_0};

/// A block of 32 elements.
///
/// # Safety
/// All methods require that the CPU has the instructions of [`Steps`].
trait Chunk: Format {
    /// The codes in the order of the elements: [`Format::decode_codes`].
    unsafe fn codes(&self) -> __m256i;

    /// The scale.
    unsafe fn scale(&self) -> f32;

    /// The negated minimum.
    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    unsafe fn minimum(&self) -> f32 {
        0.0
    }
}

/// 32 activations.
#[derive(Clone, Copy)]
pub struct Activations {
    codes: __m256i,
    scale: f32,
    /// Scale times sum of the codes, for formats with minima.
    scaled_sum: f32,
}

/// Loads activations `32 * chunk` to `32 * chunk + 31`.
///
/// # Safety
/// The CPU has the instructions of [`Steps`], and `act` has these activations, with scaled sums if `with_sum`.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn load(act: &Q8Row, chunk: usize, with_sum: bool) -> Activations {
    // SAFETY: by the contract of this function, `act` has 32 codes, a scale and, if `with_sum`, a sum for the chunk.
    unsafe {
        Activations {
            codes: _mm256_loadu_si256(act.q.as_ptr().add(chunk * 32).cast()),
            scale: act.scale.get_unchecked(chunk).get(),
            scaled_sum: if with_sum {
                act.scaled_sum.get_unchecked(chunk).get()
            } else {
                0.0
            },
        }
    }
}

/// Sums of four neighboring products of signed bytes, 32 bits each.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub fn products(codes: __m256i, act: __m256i) -> __m256i {
    let pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(act, codes));
    _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))
}

impl<F: Chunk> Steps for F {
    type Activations<'a> = Activations;

    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    unsafe fn load<'a>(act: &Q8Row<'a>, block: usize) -> Activations {
        // SAFETY: by the contract of this function.
        unsafe { load(act, block, F::MIN) }
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    unsafe fn step(block: &F, act: &Activations, acc: __m256) -> __m256 {
        // SAFETY: by the contract of this function.
        unsafe {
            let sums = _mm256_cvtepi32_ps(products(block.codes(), act.codes));
            let acc = _mm256_fmadd_ps(sums, _mm256_set1_ps(block.scale() * act.scale), acc);
            if F::MIN {
                _mm256_add_ps(
                    acc,
                    _mm256_zextps128_ps256(_mm_set_ss(block.minimum() * act.scaled_sum)),
                )
            } else {
                acc
            }
        }
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    unsafe fn decode(&self, q: &mut [i8; QK_K]) {
        // SAFETY: by the contract of this function; `q` has at least 32 bytes.
        unsafe { _mm256_storeu_si256(q.as_mut_ptr().cast(), self.codes()) }
    }
}

/// The 4-bit codes of sixteen bytes: the low halves, then the high halves.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub fn nibbles(bytes: &[u8; 16]) -> __m256i {
    let low = load_16(bytes);
    let both = _mm256_set_m128i(_mm_srli_epi16::<4>(low), low);
    _mm256_and_si256(both, _mm256_set1_epi8(15))
}

/// Sets byte `j` to 0xff if bit `j` of `qh` is set, else to 0.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn spread_bits(qh: [u8; 4]) -> __m256i {
    let byte_of_each = _mm256_set_epi64x(
        0x0303_0303_0303_0303,
        0x0202_0202_0202_0202,
        0x0101_0101_0101_0101,
        0,
    );
    let bytes = _mm256_shuffle_epi8(_mm256_set1_epi32(i32::from_le_bytes(qh)), byte_of_each);
    let bit_of_each = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64 as i64);
    _mm256_cmpeq_epi8(_mm256_and_si256(bytes, bit_of_each), bit_of_each)
}

/// Looks up 4-bit codes in a table.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub fn look_up(table: &[i8; 16], codes: __m256i) -> __m256i {
    _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load_16(table)), codes)
}

macro_rules! chunk {
    ($format:ty, |$block:ident| codes $codes:expr, scale $scale:expr $(, minimum $minimum:expr)?) => {
        impl Chunk for $format {
            #[target_feature(enable = "avx2,fma,f16c")]
            #[inline]
            unsafe fn codes(&self) -> __m256i {
                let $block = self;
                $codes
            }

            #[target_feature(enable = "avx2,fma,f16c")]
            #[inline]
            unsafe fn scale(&self) -> f32 {
                let $block = self;
                $scale
            }

            $(#[target_feature(enable = "avx2,fma,f16c")]
            #[inline]
            unsafe fn minimum(&self) -> f32 {
                let $block = self;
                $minimum
            })?
        }
    };
}

chunk!(Q4_0, |b| codes _mm256_sub_epi8(nibbles(&b.qs), _mm256_set1_epi8(8)), scale widen(b.d));
chunk!(Q4_1, |b| codes nibbles(&b.qs), scale widen(b.d), minimum widen(b.m));
chunk!(Q5_0, |b| codes {
    // `q - 16` for codes below 16: the upper half of the byte becomes ones.
    let missing = _mm256_andnot_si256(spread_bits(b.qh), _mm256_set1_epi8(0xf0_u8 as i8));
    _mm256_or_si256(nibbles(&b.qs), missing)
}, scale widen(b.d));
chunk!(Q5_1, |b| codes {
    let fifth = _mm256_and_si256(spread_bits(b.qh), _mm256_set1_epi8(16));
    _mm256_or_si256(nibbles(&b.qs), fifth)
}, scale widen(b.d), minimum widen(b.m));
chunk!(Q8_0, |b| codes load_32(&b.qs), scale widen(b.d));
chunk!(Mxfp4, |b| codes look_up(&E2M1_DOUBLED, nibbles(&b.qs)), scale E8M0_HALVED[usize::from(b.e)]);

chunk!(Iq4Nl, |b| codes look_up(&IQ4_VALUES, nibbles(&b.qs)), scale widen(b.d));

/// A block of 64 elements is two chunks.
impl Steps for Nvfp4 {
    type Activations<'a> = [Activations; 2];

    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    unsafe fn load<'a>(act: &Q8Row<'a>, block: usize) -> [Activations; 2] {
        // SAFETY: by the contract of this function.
        unsafe { [load(act, block * 2, false), load(act, block * 2 + 1, false)] }
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    unsafe fn step(block: &Nvfp4, act: &[Activations; 2], mut acc: __m256) -> __m256 {
        for chunk in 0..2 {
            let codes = nvfp4_codes(block, chunk);
            let sums = _mm256_cvtepi32_ps(products(codes, act[chunk].codes));
            let scale = |group: usize| {
                UE4M3_HALVED[usize::from(block.d[chunk * 2 + group])] * act[chunk].scale
            };
            let scales = _mm256_set_m128(_mm_set1_ps(scale(1)), _mm_set1_ps(scale(0)));
            acc = _mm256_fmadd_ps(sums, scales, acc);
        }
        acc
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    unsafe fn decode(&self, q: &mut [i8; QK_K]) {
        let (parts, _) = q.as_chunks_mut::<32>();
        for chunk in 0..2 {
            // SAFETY: the part has 32 bytes.
            unsafe {
                _mm256_storeu_si256(parts[chunk].as_mut_ptr().cast(), nvfp4_codes(self, chunk))
            }
        }
    }
}

/// The codes of elements `32 * chunk` to `32 * chunk + 31` of a block.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn nvfp4_codes(block: &Nvfp4, chunk: usize) -> __m256i {
    // The low halves of each eight bytes belong to the first eight elements of a group, the high halves to the others.
    let low = load_16(&block.qs.as_chunks().0[chunk]);
    let high = _mm_srli_epi16::<4>(low);
    let both = _mm256_set_m128i(_mm_unpackhi_epi64(low, high), _mm_unpacklo_epi64(low, high));
    look_up(&E2M1_DOUBLED, _mm256_and_si256(both, _mm256_set1_epi8(15)))
}
