//! Super-blocks whose groups of eight are entries of a codebook with signs: IQ2_XXS, IQ2_XS, IQ2_S.

use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

use super::ActivationType;
use super::format::{F16, Format, QK_K};
use super::iq_grids;

/// Each 32 elements have eight bytes: four entries, then four times seven signs and a scale of 4 bits.
#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Iq2Xxs {
    pub d: F16,
    pub qs: [u8; 64],
}

/// Each eight elements have two bytes: an entry of 9 bits and seven signs. 4-bit scales for each 16.
#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Iq2Xs {
    pub d: F16,
    pub qs: [[u8; 2]; 32],
    pub scales: [u8; 8],
}

/// Entries of 10 bits, of which two are in `qh`, and eight signs for each eight elements. 4-bit scales for each 16.
#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Iq2S {
    pub d: F16,
    pub qs: [u8; 32],
    pub signs: [u8; 32],
    pub qh: [u8; 8],
    pub scales: [u8; 8],
}

const _: () = {
    assert!(size_of::<Iq2Xxs>() == 66);
    assert!(size_of::<Iq2Xs>() == 74);
    assert!(size_of::<Iq2S>() == 82);
};

/// Eight signs of which seven are stored: the number of negative ones is even.
#[inline(always)]
pub fn even_signs(seven: u32) -> u8 {
    let seven = seven as u8 & 0x7f;
    seven | (seven.count_ones() as u8 & 1) << 7
}

/// The magnitudes with a minus where a bit of `signs` is set.
#[inline(always)]
pub fn with_signs(magnitudes: [i8; 8], signs: u8) -> [i8; 8] {
    std::array::from_fn(|j| {
        let minus = -((signs >> j & 1) as i8);
        (magnitudes[j] ^ minus) - minus
    })
}

/// Scales of 4 bits for each 16 elements: `d * (2 * s + 1) / 8`.
#[inline(always)]
fn nibble_scales(d: F16, scales: &[u8; 8], out: &mut [f32; QK_K / 16]) {
    let d = d.to_f32() / 8.0;
    for (i, out) in out.iter_mut().enumerate() {
        let s = scales[i / 2] >> (i % 2 * 4) & 15;
        *out = d * f32::from(2 * s + 1);
    }
}

/// The two words of 32 elements of IQ2_XXS.
#[inline(always)]
fn words(qs: &[u8; 64], i: usize) -> ([u8; 4], u32) {
    let (words, _) = qs.as_chunks::<4>();
    (words[2 * i], u32::from_le_bytes(words[2 * i + 1]))
}

impl Format for Iq2Xxs {
    const BLOCK: usize = QK_K;
    const GROUP: usize = 32;
    const ACTIVATION: ActivationType = ActivationType::Q8K;

    #[inline(always)]
    fn decode_codes(&self, q: &mut [i8; QK_K]) {
        let (groups, _) = q.as_chunks_mut::<8>();
        for (i, group) in groups.iter_mut().enumerate() {
            let (entries, signs) = words(&self.qs, i / 4);
            let entry = iq_grids::IQ2_XXS[usize::from(entries[i % 4])];
            *group = with_signs(entry, even_signs(signs >> (i % 4 * 7)));
        }
    }

    #[inline(always)]
    fn decode_scales(&self, scale: &mut [f32; QK_K / 16], _min: &mut [f32; QK_K / 16]) {
        let d = self.d.to_f32() / 8.0;
        for i in 0..8 {
            scale[i] = d * (2 * (words(&self.qs, i).1 >> 28) + 1) as f32;
        }
    }
}

impl Format for Iq2Xs {
    const BLOCK: usize = QK_K;
    const GROUP: usize = 16;
    const ACTIVATION: ActivationType = ActivationType::Q8K;

    #[inline(always)]
    fn decode_codes(&self, q: &mut [i8; QK_K]) {
        let (groups, _) = q.as_chunks_mut::<8>();
        for (group, &code) in groups.iter_mut().zip(&self.qs) {
            let code = u16::from_le_bytes(code);
            let entry = iq_grids::IQ2_XS[usize::from(code & 511)];
            *group = with_signs(entry, even_signs(u32::from(code >> 9)));
        }
    }

    #[inline(always)]
    fn decode_scales(&self, scale: &mut [f32; QK_K / 16], _min: &mut [f32; QK_K / 16]) {
        nibble_scales(self.d, &self.scales, scale);
    }
}

impl Format for Iq2S {
    const BLOCK: usize = QK_K;
    const GROUP: usize = 16;
    const ACTIVATION: ActivationType = ActivationType::Q8K;

    #[inline(always)]
    fn decode_codes(&self, q: &mut [i8; QK_K]) {
        let (groups, _) = q.as_chunks_mut::<8>();
        for (i, group) in groups.iter_mut().enumerate() {
            let upper = self.qh[i / 4] >> (i % 4 * 2) & 3;
            let entry = usize::from(self.qs[i]) | usize::from(upper) << 8;
            *group = with_signs(iq_grids::IQ2_S[entry], self.signs[i]);
        }
    }

    #[inline(always)]
    fn decode_scales(&self, scale: &mut [f32; QK_K / 16], _min: &mut [f32; QK_K / 16]) {
        nibble_scales(self.d, &self.scales, scale);
    }
}
