//! Super-blocks whose codes are decoded before the product: TQ1_0, IQ4_XS and the formats with codebooks.

use std::arch::x86_64::*;

use super::Steps;
use super::transpose::transpose;
use crate::cpu::quant::activation::Q8Row;
use crate::cpu::quant::format::{Codebook, Format, QK_K};
use crate::cpu::quant::iq1::{Iq1M, Iq1S};
use crate::cpu::quant::iq2::{Iq2S, Iq2Xs, Iq2Xxs};
use crate::cpu::quant::iq3::{Iq3S, Iq3Xxs};
use crate::cpu::quant::iq4::{IQ4_VALUES, Iq4Xs};
use crate::cpu::quant::ternary::Tq1_0;

/// A super-block as four vectors of codes.
///
/// # Safety
/// All methods require that the CPU has the instructions of [`Steps`].
trait Decoded: Format {
    /// The codes in the order of the elements: [`Format::decode_codes`].
    unsafe fn vectors(&self) -> [__m512i; 4];

    /// The scales of the groups. With groups of 32 elements, only the first eight lanes are used.
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    #[inline]
    unsafe fn scales(&self) -> __m512 {
        let (mut scales, mut mins) = ([0.0; QK_K / 16], [0.0; QK_K / 16]);
        self.decode_scales(&mut scales, &mut mins);
        // SAFETY: the array has sixteen floats.
        unsafe { _mm512_loadu_ps(scales.as_ptr()) }
    }
}

/// The activations of a super-block.
#[derive(Clone, Copy)]
pub struct Activations {
    codes: [__m512i; 4],
    /// Minus 128 times the sum of each four codes, because 128 is added to the codes of the weights to make them unsigned.
    starts: [__m512i; 4],
    scale: f32,
}

/// [`Steps::load`].
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
unsafe fn load(act: &Q8Row, step: usize) -> Activations {
    let zero = _mm512_setzero_si512();
    // SAFETY: by the contract of `Steps::load`, `act` has 256 codes and a scale for the step.
    unsafe {
        let mut codes = [zero; 4];
        let mut starts = [zero; 4];
        for i in 0..4 {
            codes[i] = _mm512_loadu_si512(act.q.as_ptr().add(step * QK_K + i * 64).cast());
            let offset = _mm512_dpbusd_epi32(zero, _mm512_set1_epi8(-128), codes[i]);
            starts[i] = _mm512_sub_epi32(zero, offset);
        }
        Activations {
            codes,
            starts,
            scale: act.scale.get_unchecked(step).get(),
        }
    }
}

/// [`Steps::step`].
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
unsafe fn step<F: Decoded>(block: &F, act: &Activations, mut acc: __m512) -> __m512 {
    // SAFETY: by the contract of this function.
    let (vectors, scales) = unsafe { (block.vectors(), block.scales()) };
    let scales = _mm512_mul_ps(scales, _mm512_set1_ps(act.scale));
    for i in 0..4 {
        let codes = _mm512_xor_si512(vectors[i], _mm512_set1_epi8(-128));
        let sums = _mm512_dpbusd_epi32(act.starts[i], codes, act.codes[i]);
        // A lane is the sum of four products, so a group has four or eight lanes.
        let first = (i * 64 / F::GROUP) as i32;
        let group = match F::GROUP {
            16 => _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0),
            _ => _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0),
        };
        let scales =
            _mm512_permutexvar_ps(_mm512_add_epi32(group, _mm512_set1_epi32(first)), scales);
        acc = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums), scales, acc);
    }
    acc
}

/// [`Steps::decode`].
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
unsafe fn decode<F: Decoded>(block: &F, q: *mut i8) {
    // SAFETY: 256 bytes can be written to `q`, by the contract of `Steps::decode`.
    unsafe {
        for (i, vector) in block.vectors().into_iter().enumerate() {
            _mm512_storeu_si512(q.add(i * 64).cast(), vector);
        }
    }
}

/// [`Steps::decode_scales_of_16`].
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
unsafe fn decode_scales_of_16<F: Decoded>(blocks: [&F; 16], scale: *mut __m512) {
    let mut scales = [_mm512_setzero_si512(); 16];
    for (scales, block) in scales.iter_mut().zip(blocks) {
        // SAFETY: by the contract of this function.
        *scales = _mm512_castps_si512(unsafe { block.scales() });
    }
    let scales = transpose(scales);
    for i in 0..QK_K / F::GROUP {
        // SAFETY: `scale` can be written for all groups, by the contract of `Steps::decode_scales_of_16`.
        unsafe { scale.add(i * 2).write(_mm512_castsi512_ps(scales[i])) }
    }
}

impl Decoded for Iq4Xs {
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    #[inline]
    unsafe fn vectors(&self) -> [__m512i; 4] {
        // SAFETY: the arrays have 16 and 128 bytes.
        unsafe {
            let table = _mm512_broadcast_i32x4(_mm_loadu_si128(IQ4_VALUES.as_ptr().cast()));
            let mut vectors = [table; 4];
            for (i, vector) in vectors.iter_mut().enumerate() {
                let bytes = _mm256_loadu_si256(self.qs.as_ptr().add(i * 32).cast());
                // The low halves of each sixteen bytes belong to 16 elements, the high halves to the next 16.
                let twice = _mm512_set_epi64(3, 2, 3, 2, 1, 0, 1, 0);
                let twice = _mm512_permutexvar_epi64(twice, _mm512_castsi256_si512(bytes));
                let nibbles = _mm512_srlv_epi64(twice, _mm512_set_epi64(4, 4, 0, 0, 4, 4, 0, 0));
                *vector =
                    _mm512_shuffle_epi8(table, _mm512_and_si512(nibbles, _mm512_set1_epi8(15)));
            }
            vectors
        }
    }

    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    #[inline]
    unsafe fn scales(&self) -> __m512 {
        _mm512_zextps256_ps512(self.eight_scales())
    }
}

impl Iq4Xs {
    /// The scales of the eight groups.
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    #[inline]
    fn eight_scales(&self) -> __m256 {
        let low = _mm256_set1_epi32(i32::from_le_bytes(self.scales_l));
        let low = _mm256_srlv_epi32(low, _mm256_set_epi32(28, 24, 20, 16, 12, 8, 4, 0));
        let high = _mm256_set1_epi32(i32::from(u16::from_le_bytes(self.scales_h)));
        let high = _mm256_srlv_epi32(high, _mm256_set_epi32(14, 12, 10, 8, 6, 4, 2, 0));
        let low = _mm256_and_si256(low, _mm256_set1_epi32(15));
        let high = _mm256_slli_epi32::<4>(_mm256_and_si256(high, _mm256_set1_epi32(3)));
        let integers = _mm256_sub_epi32(_mm256_or_si256(low, high), _mm256_set1_epi32(32));
        let d = _mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(self.d.bits())));
        _mm256_mul_ps(_mm256_cvtepi32_ps(integers), _mm256_broadcastss_ps(d))
    }
}

/// Formats with codebooks. The vectors are assembled from groups in registers: storing groups and loading vectors from there
/// would stall on store forwarding.
macro_rules! codebooks {
    ($($format:ty),*) => {
        $(impl Decoded for $format {
            #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
            #[inline]
            unsafe fn vectors(&self) -> [__m512i; 4] {
                let group = |i: usize| i64::from_ne_bytes(self.group(i).map(|v| v as u8));
                let mut vectors = [_mm512_setzero_si512(); 4];
                for (k, vector) in vectors.iter_mut().enumerate() {
                    let g = |i: usize| group(8 * k + i);
                    *vector = _mm512_set_epi64(g(7), g(6), g(5), g(4), g(3), g(2), g(1), g(0));
                }
                vectors
            }
        })*
    };
}

codebooks!(Iq1S, Iq1M, Iq2Xxs, Iq2Xs, Iq2S, Iq3Xxs, Iq3S);

/// Formats whose codes are decoded by scalar code.
macro_rules! decoded_without_vectors {
    ($($format:ty),*) => {
        $(impl Decoded for $format {
            #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
            #[inline]
            unsafe fn vectors(&self) -> [__m512i; 4] {
                let mut q = [0; QK_K];
                self.decode_codes(&mut q);
                let (parts, _) = q.as_chunks::<64>();
                let mut vectors = [_mm512_setzero_si512(); 4];
                for (vector, part) in vectors.iter_mut().zip(parts) {
                    // SAFETY: the part has 64 bytes.
                    *vector = unsafe { _mm512_loadu_si512(part.as_ptr().cast()) };
                }
                vectors
            }
        })*
    };
}

decoded_without_vectors!(Tq1_0);

macro_rules! steps {
    ($($format:ty),*) => {
        $(impl Steps for $format {
            const STEP: usize = QK_K;
            type Activations<'a> = Activations;

            #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
            #[inline]
            unsafe fn load<'a>(act: &Q8Row<'a>, step: usize) -> Activations {
                // SAFETY: by the contract of this function.
                unsafe { load(act, step) }
            }

            #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
            #[inline]
            unsafe fn step(block: *const Self, act: &Activations, acc: __m512) -> __m512 {
                // SAFETY: by the contract of this function.
                unsafe { step(&*block, act, acc) }
            }

            #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
            #[inline]
            unsafe fn decode(block: *const Self, q: *mut i8) {
                // SAFETY: by the contract of this function.
                unsafe { decode(&*block, q) }
            }

            #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
            #[inline]
            unsafe fn decode_scales_of_16(blocks: [&Self; 16], scale: *mut __m512, _min: *mut __m512) {
                // SAFETY: by the contract of this function.
                unsafe { decode_scales_of_16(blocks, scale) }
            }
        })*
    };
}

steps!(Iq4Xs, Iq1S, Iq1M, Iq2Xxs, Iq2Xs, Iq2S, Iq3Xxs, Iq3S, Tq1_0);
