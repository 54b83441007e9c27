//! Super-blocks whose groups of eight are entries of a codebook with signs: IQ2_XXS, IQ2_XS, IQ2_S.

use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

use super::ActivationType;
use super::format::{Codebook, F16, Format, QK_K, decode_groups};
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

/// All ones in the bytes whose bit of the index is set.
static MASKS: [u64; 256] = {
    let mut masks = [0; 256];
    let mut bits = 0;
    while bits < 256 {
        let mut j = 0;
        while j < 8 {
            masks[bits] |= ((bits as u64 >> j & 1) * 0xff) << (8 * j);
            j += 1;
        }
        bits += 1;
    }
    masks
};

/// Eight signs of which seven are stored: the number of negative ones is even.
static EVEN_SIGNS: [u8; 128] = {
    let mut signs = [0; 128];
    let mut seven = 0;
    while seven < 128u32 {
        signs[seven as usize] = (seven | (seven.count_ones() & 1) << 7) as u8;
        seven += 1;
    }
    signs
};

/// The magnitudes with a minus where a bit of `signs` is set. None of them may be zero.
#[inline(always)]
pub fn with_signs(magnitudes: [i8; 8], signs: u8) -> [i8; 8] {
    let mask = MASKS[usize::from(signs)];
    let magnitudes = u64::from_ne_bytes(magnitudes.map(|m| m as u8));
    // Two's complement in all bytes at once; no carry leaves a byte, because none is zero.
    let negated = (magnitudes ^ mask).wrapping_add(mask & 0x0101_0101_0101_0101);
    negated.to_ne_bytes().map(|v| v as i8)
}

/// As [`with_signs`], with the lowest seven bits as signs and the eighth such that an even number is negative.
#[inline(always)]
pub fn with_even_signs(magnitudes: [i8; 8], seven: u32) -> [i8; 8] {
    with_signs(magnitudes, EVEN_SIGNS[(seven & 127) as usize])
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

impl Codebook for Iq2Xxs {
    #[inline(always)]
    fn group(&self, i: usize) -> [i8; 8] {
        let (entries, signs) = words(&self.qs, i / 4);
        let entry = iq_grids::IQ2_XXS[usize::from(entries[i % 4])];
        with_even_signs(entry, signs >> (i % 4 * 7))
    }
}

impl Format for Iq2Xxs {
    const BLOCK: usize = QK_K;
    const GROUP: usize = 32;
    const ACTIVATION: ActivationType = ActivationType::Q8K;

    #[inline(always)]
    fn decode_codes(&self, q: &mut [i8; QK_K]) {
        decode_groups(self, q);
    }

    #[inline(always)]
    fn decode_scales(&self, scale: &mut [f32; QK_K / 16], _min: &mut [f32; QK_K / 16]) {
        let d = self.d.to_f32() / 8.0;
        for (i, scale) in scale[..8].iter_mut().enumerate() {
            *scale = d * (2 * (words(&self.qs, i).1 >> 28) + 1) as f32;
        }
    }
}

impl Codebook for Iq2Xs {
    #[inline(always)]
    fn group(&self, i: usize) -> [i8; 8] {
        let code = u16::from_le_bytes(self.qs[i]);
        let entry = iq_grids::IQ2_XS[usize::from(code & 511)];
        with_even_signs(entry, u32::from(code >> 9))
    }
}

impl Format for Iq2Xs {
    const BLOCK: usize = QK_K;
    const GROUP: usize = 16;
    const ACTIVATION: ActivationType = ActivationType::Q8K;

    #[inline(always)]
    fn decode_codes(&self, q: &mut [i8; QK_K]) {
        decode_groups(self, q);
    }

    #[inline(always)]
    fn decode_scales(&self, scale: &mut [f32; QK_K / 16], _min: &mut [f32; QK_K / 16]) {
        nibble_scales(self.d, &self.scales, scale);
    }
}

impl Codebook for Iq2S {
    #[inline(always)]
    fn group(&self, i: usize) -> [i8; 8] {
        let upper = self.qh[i / 4] >> (i % 4 * 2) & 3;
        let entry = usize::from(self.qs[i]) | usize::from(upper) << 8;
        with_signs(iq_grids::IQ2_S[entry], self.signs[i])
    }
}

impl Format for Iq2S {
    const BLOCK: usize = QK_K;
    const GROUP: usize = 16;
    const ACTIVATION: ActivationType = ActivationType::Q8K;

    #[inline(always)]
    fn decode_codes(&self, q: &mut [i8; QK_K]) {
        decode_groups(self, q);
    }

    #[inline(always)]
    fn decode_scales(&self, scale: &mut [f32; QK_K / 16], _min: &mut [f32; QK_K / 16]) {
        nibble_scales(self.d, &self.scales, scale);
    }
}
