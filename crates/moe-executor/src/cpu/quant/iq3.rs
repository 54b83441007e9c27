//! Super-blocks whose groups of four are entries of a codebook of magnitudes with separate signs: IQ3_XXS, IQ3_S.

use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

use super::ActivationType;
use super::format::{Codebook, F16, Format, QK_K, decode_groups};
use super::iq_grids;
use super::iq2::{with_even_signs, with_signs};

/// IQ3_XXS: four elements have an 8-bit index of the codebook. 32 elements have a word with four times seven sign bits and a
/// 4-bit scale.
#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Iq3Xxs {
    pub d: F16,
    pub qs: [u8; 64],
    pub signs_and_scales: [[u8; 4]; 8],
}

/// IQ3_S: four elements have a 9-bit index of the codebook, with the highest bit in `qh`. Eight elements have eight sign bits,
/// 32 elements a 4-bit scale.
#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Iq3S {
    pub d: F16,
    pub qs: [u8; 64],
    pub qh: [u8; 8],
    pub signs: [u8; 32],
    pub scales: [u8; 4],
}

const _: () = {
    assert!(size_of::<Iq3Xxs>() == 98);
    assert!(size_of::<Iq3S>() == 110);
};

/// The concatenation of two entries.
#[inline(always)]
fn join(first: [i8; 4], second: [i8; 4]) -> [i8; 8] {
    let [a, b, c, d] = first;
    let [e, f, g, h] = second;
    [a, b, c, d, e, f, g, h]
}

impl Codebook for Iq3Xxs {
    #[inline(always)]
    fn group(&self, i: usize) -> [i8; 8] {
        let signs = u32::from_le_bytes(self.signs_and_scales[i / 4]) >> (i % 4 * 7);
        let entry = |k: usize| iq_grids::IQ3_XXS[usize::from(self.qs[2 * i + k])];
        with_even_signs(join(entry(0), entry(1)), signs)
    }
}

impl Format for Iq3Xxs {
    const BLOCK: usize = QK_K;
    const GROUP: usize = 32;
    const ACTIVATION: ActivationType = ActivationType::Q8K;

    #[inline(always)]
    fn decode_codes(&self, q: &mut [i8; QK_K]) {
        decode_groups(self, q);
    }

    #[inline(always)]
    fn decode_scales(&self, scale: &mut [f32; QK_K / 16], _min: &mut [f32; QK_K / 16]) {
        let d = self.d.to_f32() / 4.0;
        for (scale, &word) in scale.iter_mut().zip(&self.signs_and_scales) {
            *scale = d * (2 * (u32::from_le_bytes(word) >> 28) + 1) as f32;
        }
    }
}

impl Codebook for Iq3S {
    #[inline(always)]
    fn group(&self, i: usize) -> [i8; 8] {
        let entry = |k: usize| {
            let upper = self.qh[i / 4] >> (i % 4 * 2 + k) & 1;
            iq_grids::IQ3_S[usize::from(self.qs[2 * i + k]) | usize::from(upper) << 8]
        };
        with_signs(join(entry(0), entry(1)), self.signs[i])
    }
}

impl Format for Iq3S {
    const BLOCK: usize = QK_K;
    const GROUP: usize = 32;
    const ACTIVATION: ActivationType = ActivationType::Q8K;

    #[inline(always)]
    fn decode_codes(&self, q: &mut [i8; QK_K]) {
        decode_groups(self, q);
    }

    #[inline(always)]
    fn decode_scales(&self, scale: &mut [f32; QK_K / 16], _min: &mut [f32; QK_K / 16]) {
        let d = self.d.to_f32();
        for (i, scale) in scale[..8].iter_mut().enumerate() {
            let s = self.scales[i / 2] >> (i % 2 * 4) & 15;
            *scale = d * f32::from(2 * s + 1);
        }
    }
}
