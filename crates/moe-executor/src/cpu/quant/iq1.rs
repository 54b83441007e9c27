//! Super-blocks whose groups of eight are entries of a ternary codebook plus or minus 1/8: IQ1_S, IQ1_M.
//!
//! The codes here are multiplied by 8, so that they are integers, and the scales are divided by 8.

use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

use super::ActivationType;
use super::format::{Codebook, F16, Format, QK_K, decode_groups, f16_to_f32};
use super::iq_grids;

/// IQ1_S: a group of eight elements has an 11-bit index of the codebook, with the low 8 bits in `qs`.
///
/// A word of `qh` belongs to 32 elements: the upper 3 bits of four indices, a 3-bit scale, and in the highest bit the sign of
/// the shift (1 means -1/8).
#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Iq1S {
    pub d: F16,
    pub qs: [u8; 32],
    pub qh: [[u8; 2]; 8],
}

/// IQ1_M: a group of eight elements has an 11-bit index of the codebook, with the low 8 bits in `qs`.
///
/// Four bits of `qh` belong to a group: the upper 3 bits of the index and the sign of the shift (1 means -1/8). A word of
/// `scales` has the 3-bit scales of four times 16 elements. The highest four bits of the four words are the half-precision
/// scale of the super-block.
#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Iq1M {
    pub qs: [u8; 32],
    pub qh: [u8; 16],
    pub scales: [[u8; 2]; 4],
}

const _: () = {
    assert!(size_of::<Iq1S>() == 50);
    assert!(size_of::<Iq1M>() == 56);
};

/// Eight times (an entry of the codebook plus or minus 1/8).
#[inline(always)]
fn shifted(entry: usize, down: bool) -> [i8; 8] {
    let entry = u64::from_ne_bytes(iq_grids::IQ1[entry].map(|v| v as u8));
    let shift = if down {
        u64::MAX
    } else {
        0x0101_0101_0101_0101
    };
    // Adds eight bytes at once: the highest bit of each byte is added without carry.
    let top = 0x8080_8080_8080_8080;
    let sum = ((entry & !top) + (shift & !top)) ^ ((entry ^ shift) & top);
    sum.to_ne_bytes().map(|v| v as i8)
}

impl Codebook for Iq1S {
    #[inline(always)]
    fn group(&self, i: usize) -> [i8; 8] {
        let word = u16::from_le_bytes(self.qh[i / 4]);
        let upper = word >> (i % 4 * 3) & 7;
        shifted(
            usize::from(self.qs[i]) | usize::from(upper) << 8,
            word >> 15 == 1,
        )
    }
}

impl Format for Iq1S {
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
        for (scale, &word) in scale.iter_mut().zip(&self.qh) {
            *scale = d * f32::from(2 * (u16::from_le_bytes(word) >> 12 & 7) + 1);
        }
    }
}

impl Codebook for Iq1M {
    #[inline(always)]
    fn group(&self, i: usize) -> [i8; 8] {
        let nibble = self.qh[i / 2] >> (i % 2 * 4);
        shifted(
            usize::from(self.qs[i]) | usize::from(nibble & 7) << 8,
            nibble >> 3 & 1 == 1,
        )
    }
}

impl Format for Iq1M {
    const BLOCK: usize = QK_K;
    const GROUP: usize = 16;
    const ACTIVATION: ActivationType = ActivationType::Q8K;

    #[inline(always)]
    fn decode_codes(&self, q: &mut [i8; QK_K]) {
        decode_groups(self, q);
    }

    #[inline(always)]
    fn decode_scales(&self, scale: &mut [f32; QK_K / 16], _min: &mut [f32; QK_K / 16]) {
        let words = self.scales.map(u16::from_le_bytes);
        let d = words[0] >> 12 | words[1] >> 12 << 4 | words[2] >> 12 << 8 | words[3] >> 12 << 12;
        let d = f16_to_f32(d) / 8.0;
        for (i, scale) in scale.iter_mut().enumerate() {
            *scale = d * f32::from(2 * (words[i / 4] >> (i % 4 * 3) & 7) + 1);
        }
    }
}
