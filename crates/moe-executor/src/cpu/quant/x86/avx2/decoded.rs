//! Super-blocks whose codes are decoded before the product: TQ1_0, IQ4_XS and the formats with codebooks.

use std::arch::x86_64::*;

use super::chunks::{look_up, nibbles, products};
use super::{Steps, load_32};
use crate::cpu::quant::activation::Q8Row;
use crate::cpu::quant::format::{Format, QK_K};
use crate::cpu::quant::iq1::{Iq1M, Iq1S};
use crate::cpu::quant::iq2::{Iq2S, Iq2Xs, Iq2Xxs};
use crate::cpu::quant::iq3::{Iq3S, Iq3Xxs};
use crate::cpu::quant::iq4::{IQ4_VALUES, Iq4Xs};
use crate::cpu::quant::ternary::Tq1_0;

/// A super-block as eight vectors of codes.
trait Decoded: Format {
    /// The codes in the order of the elements: [`Format::decode_codes`].
    ///
    /// # Safety
    /// The CPU has the instructions of [`Steps`].
    unsafe fn vectors(&self) -> [__m256i; 8];
}

/// The activations of a super-block.
#[derive(Clone, Copy)]
pub struct Activations<'a> {
    codes: &'a [[i8; 32]; 8],
    scale: f32,
}

/// [`Steps::step`].
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn step<F: Decoded>(block: &F, act: &Activations, mut acc: __m256) -> __m256 {
    let (mut scales, mut mins) = ([0.0; QK_K / 16], [0.0; QK_K / 16]);
    block.decode_scales(&mut scales, &mut mins);
    // SAFETY: by the contract of this function.
    let vectors = unsafe { block.vectors() };
    for i in 0..8 {
        let sums = _mm256_cvtepi32_ps(products(vectors[i], load_32(&act.codes[i])));
        let scale = |group: usize| _mm_set1_ps(scales[group] * act.scale);
        let scales = match F::GROUP {
            16 => _mm256_set_m128(scale(2 * i + 1), scale(2 * i)),
            _ => _mm256_set_m128(scale(i), scale(i)),
        };
        acc = _mm256_fmadd_ps(sums, scales, acc);
    }
    acc
}

/// [`Steps::decode`].
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn decode<F: Decoded>(block: &F, q: &mut [i8; QK_K]) {
    let (parts, _) = q.as_chunks_mut::<32>();
    // SAFETY: by the contract of this function; each part has 32 bytes.
    unsafe {
        for (part, vector) in parts.iter_mut().zip(block.vectors()) {
            _mm256_storeu_si256(part.as_mut_ptr().cast(), vector);
        }
    }
}

impl Decoded for Iq4Xs {
    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    unsafe fn vectors(&self) -> [__m256i; 8] {
        let (bytes, _) = self.qs.as_chunks::<16>();
        let mut vectors = [_mm256_setzero_si256(); 8];
        for (vector, bytes) in vectors.iter_mut().zip(bytes) {
            *vector = look_up(&IQ4_VALUES, nibbles(bytes));
        }
        vectors
    }
}

/// Formats whose codes are decoded by scalar code.
macro_rules! decoded_without_vectors {
    ($($format:ty),*) => {
        $(impl Decoded for $format {
            #[target_feature(enable = "avx2,fma,f16c")]
            #[inline]
            unsafe fn vectors(&self) -> [__m256i; 8] {
                let mut q = [0; QK_K];
                self.decode_codes(&mut q);
                let (parts, _) = q.as_chunks::<32>();
                let mut vectors = [_mm256_setzero_si256(); 8];
                for (vector, part) in vectors.iter_mut().zip(parts) {
                    *vector = load_32(part);
                }
                vectors
            }
        })*
    };
}

decoded_without_vectors!(Iq1S, Iq1M, Iq2Xxs, Iq2Xs, Iq2S, Iq3Xxs, Iq3S, Tq1_0);

macro_rules! steps {
    ($($format:ty),*) => {
        $(impl Steps for $format {
            type Activations<'a> = Activations<'a>;

            #[target_feature(enable = "avx2,fma,f16c")]
            #[inline]
            unsafe fn load<'a>(act: &Q8Row<'a>, block: usize) -> Activations<'a> {
                // SAFETY: by the contract of this function, `act` has 256 codes and a scale for the block.
                unsafe {
                    Activations {
                        codes: &*act.q.as_ptr().add(block * QK_K).cast(),
                        scale: act.scale.get_unchecked(block).get(),
                    }
                }
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
        })*
    };
}

steps!(Iq4Xs, Iq1S, Iq1M, Iq2Xxs, Iq2Xs, Iq2S, Iq3Xxs, Iq3S, Tq1_0);
