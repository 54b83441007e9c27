//! Super-blocks whose groups of eight are entries of a codebook of magnitudes with separate signs: IQ2_XXS, IQ2_XS, IQ2_S.

use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

use super::ActivationType;
use super::format::{Codebook, F16, Format, QK_K, decode_groups};
use super::iq_grids;

/// IQ2_XXS: 32 elements have eight bytes of `qs`: four 8-bit indices of the codebook, then a word with four times seven sign
/// bits and a 4-bit scale.
#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Iq2Xxs {
    pub d: F16,
    pub qs: [u8; 64],
}

/// IQ2_XS: eight elements have a word of `qs`: a 9-bit index of the codebook and seven sign bits. 16 elements have a 4-bit
/// scale.
#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Iq2Xs {
    pub d: F16,
    pub qs: [[u8; 2]; 32],
    pub scales: [u8; 8],
}

/// IQ2_S: eight elements have a 10-bit index of the codebook, with the upper two bits in `qh`, and eight sign bits. 16 elements
/// have a 4-bit scale.
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

/// For each byte of signs, a mask with 0xff in byte `j` if bit `j` is set.
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

/// Eight sign bits by the seven that are stored: the number of set bits is even.
static EVEN_SIGNS: [u8; 128] = {
    let mut signs = [0; 128];
    let mut seven = 0;
    while seven < 128u32 {
        signs[seven as usize] = (seven | (seven.count_ones() & 1) << 7) as u8;
        seven += 1;
    }
    signs
};

/// The magnitudes, negated where a bit of `signs` is set. No magnitude may be 0.
#[inline(always)]
pub fn with_signs(magnitudes: [i8; 8], signs: u8) -> [i8; 8] {
    let mask = MASKS[usize::from(signs)];
    let magnitudes = u64::from_ne_bytes(magnitudes.map(|m| m as u8));
    // The two's complement of eight bytes at once. No byte has a carry, because no magnitude is 0.
    let negated = (magnitudes ^ mask).wrapping_add(mask & 0x0101_0101_0101_0101);
    negated.to_ne_bytes().map(|v| v as i8)
}

/// Like [`with_signs`], with the low seven bits of `seven` as signs; the eighth makes the number of negative elements even.
#[inline(always)]
pub fn with_even_signs(magnitudes: [i8; 8], seven: u32) -> [i8; 8] {
    with_signs(magnitudes, EVEN_SIGNS[(seven & 127) as usize])
}

/// Scales of 16 elements from 4-bit numbers `s`: `d * (2 * s + 1) / 8`.
#[inline(always)]
fn nibble_scales(d: F16, scales: &[u8; 8], out: &mut [f32; QK_K / 16]) {
    let d = d.to_f32() / 8.0;
    for (i, out) in out.iter_mut().enumerate() {
        let s = scales[i / 2] >> (i % 2 * 4) & 15;
        *out = d * f32::from(2 * s + 1);
    }
}

/// The two words of elements `32 * i` to `32 * i + 31` of IQ2_XXS: four indices, and signs with the scale.
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
