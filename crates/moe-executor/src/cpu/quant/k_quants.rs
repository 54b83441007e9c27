//! Super-blocks of 256 elements whose groups have small integer scales of their own: Q2_K to Q6_K.

use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

use super::ActivationType;
use super::format::{F16, Format, QK_K};

/// 2 bits; each 16 elements have a scale (low half of a byte) and a minimum (high half), 4 bits each.
#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Q2K {
    pub scales: [u8; 16],
    pub qs: [u8; 64],
    pub d: F16,
    pub dmin: F16,
}

/// 3 bits, the third in `hmask`; each 16 elements have a scale of 6 bits.
#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Q3K {
    pub hmask: [u8; 32],
    pub qs: [u8; 64],
    pub scales: [u8; 12],
    pub d: F16,
}

/// 4 bits; each 32 elements have a scale and a minimum of 6 bits each.
#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Q4K {
    pub d: F16,
    pub dmin: F16,
    pub scales: [u8; 12],
    pub qs: [u8; 128],
}

/// 5 bits, the fifth in `qh`; scales and minima as in Q4_K.
#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Q5K {
    pub d: F16,
    pub dmin: F16,
    pub scales: [u8; 12],
    pub qh: [u8; 32],
    pub qs: [u8; 128],
}

/// 6 bits, the upper two in `qh`; each 16 elements have a scale of 8 bits with a sign.
#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Q6K {
    pub ql: [u8; 128],
    pub qh: [u8; 64],
    pub scales: [i8; 16],
    pub d: F16,
}

const _: () = {
    assert!(size_of::<Q2K>() == 84);
    assert!(size_of::<Q3K>() == 110);
    assert!(size_of::<Q4K>() == 144);
    assert!(size_of::<Q5K>() == 176);
    assert!(size_of::<Q6K>() == 210);
};

/// The eight scales and the eight minima of Q4_K and Q5_K. Bytes 0..4 hold the first four scales and bytes 4..8 the
/// first four minima in their low six bits; bytes 8..12 hold the low halves of the last four (scale, minimum), whose
/// upper two bits are the upper two of the bytes before.
#[inline(always)]
pub fn scales_and_mins(packed: &[u8; 12]) -> ([u8; 8], [u8; 8]) {
    let word = |at: usize| {
        u32::from_le_bytes([packed[at], packed[at + 1], packed[at + 2], packed[at + 3]])
    };
    let (first, second, third) = (word(0), word(4), word(8));
    let join = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
    let upper = |w: u32| w >> 2 & 0x3030_3030;
    let scales = join(first & 0x3f3f_3f3f, third & 0x0f0f_0f0f | upper(first));
    let mins = join(
        second & 0x3f3f_3f3f,
        third >> 4 & 0x0f0f_0f0f | upper(second),
    );
    (scales.to_le_bytes(), mins.to_le_bytes())
}

/// The sixteen scales of Q3_K, still with their offset of 32. Bytes 0..8 hold the low halves (the last eight in the upper
/// four bits), bytes 8..12 the upper two bits of four scales each.
#[inline(always)]
pub fn q3_k_scales(packed: &[u8; 12]) -> [u8; 16] {
    std::array::from_fn(|j| {
        let low = packed[j % 8] >> (j / 8 * 4) & 15;
        let high = packed[8 + j % 4] >> (j / 4 * 2) & 3;
        low | high << 4
    })
}

/// `out[j] = code(j)` for the 32 elements from `first` on.
#[inline(always)]
fn fill_32(q: &mut [i8; QK_K], first: usize, code: impl Fn(usize) -> u8) {
    let codes: [i8; 32] = std::array::from_fn(|j| code(j) as i8);
    q[first..][..32].copy_from_slice(&codes);
}

/// Scales and minima of Q4_K and Q5_K as floating-point numbers.
#[inline(always)]
fn float_scales_and_mins(d: F16, dmin: F16, packed: &[u8; 12], scale: &mut [f32], min: &mut [f32]) {
    let (d, dmin) = (d.to_f32(), dmin.to_f32());
    let (scales, mins) = scales_and_mins(packed);
    for group in 0..8 {
        scale[group] = d * f32::from(scales[group]);
        min[group] = dmin * f32::from(mins[group]);
    }
}

impl Format for Q2K {
    const BLOCK: usize = QK_K;
    const GROUP: usize = 16;
    const ACTIVATION: ActivationType = ActivationType::Q8K;
    const MIN: bool = true;

    #[inline(always)]
    fn decode_codes(&self, q: &mut [i8; QK_K]) {
        // Each half of the super-block has 32 bytes, which hold four times 32 elements.
        let (halves, _) = self.qs.as_chunks::<32>();
        for i in 0..8 {
            let (bytes, shift) = (&halves[i / 4], i % 4 * 2);
            fill_32(q, i * 32, |j| bytes[j] >> shift & 3);
        }
    }

    #[inline(always)]
    fn decode_scales(&self, scale: &mut [f32; QK_K / 16], min: &mut [f32; QK_K / 16]) {
        let (d, dmin) = (self.d.to_f32(), self.dmin.to_f32());
        for group in 0..16 {
            scale[group] = d * f32::from(self.scales[group] & 15);
            min[group] = dmin * f32::from(self.scales[group] >> 4);
        }
    }
}

impl Format for Q3K {
    const BLOCK: usize = QK_K;
    const GROUP: usize = 16;
    const ACTIVATION: ActivationType = ActivationType::Q8K;

    #[inline(always)]
    fn decode_codes(&self, q: &mut [i8; QK_K]) {
        // The low bits lie as in Q2_K; bit `i` of `hmask` belongs to the `i`th 32 elements.
        let (halves, _) = self.qs.as_chunks::<32>();
        for i in 0..8 {
            let (bytes, shift) = (&halves[i / 4], i % 4 * 2);
            let third = |j: usize| self.hmask[j] >> i & 1;
            fill_32(q, i * 32, |j| {
                (bytes[j] >> shift & 3 | third(j) << 2).wrapping_sub(4)
            });
        }
    }

    #[inline(always)]
    fn decode_scales(&self, scale: &mut [f32; QK_K / 16], _min: &mut [f32; QK_K / 16]) {
        let d = self.d.to_f32();
        for (scale, integer) in scale.iter_mut().zip(q3_k_scales(&self.scales)) {
            *scale = d * (f32::from(integer) - 32.0);
        }
    }
}

impl Format for Q4K {
    const BLOCK: usize = QK_K;
    const GROUP: usize = 32;
    const ACTIVATION: ActivationType = ActivationType::Q8K;
    const MIN: bool = true;

    #[inline(always)]
    fn decode_codes(&self, q: &mut [i8; QK_K]) {
        let (pairs, _) = self.qs.as_chunks::<32>();
        for i in 0..8 {
            let (bytes, shift) = (&pairs[i / 2], i % 2 * 4);
            fill_32(q, i * 32, |j| bytes[j] >> shift & 15);
        }
    }

    #[inline(always)]
    fn decode_scales(&self, scale: &mut [f32; QK_K / 16], min: &mut [f32; QK_K / 16]) {
        float_scales_and_mins(self.d, self.dmin, &self.scales, scale, min);
    }
}

impl Format for Q5K {
    const BLOCK: usize = QK_K;
    const GROUP: usize = 32;
    const ACTIVATION: ActivationType = ActivationType::Q8K;
    const MIN: bool = true;

    #[inline(always)]
    fn decode_codes(&self, q: &mut [i8; QK_K]) {
        let (pairs, _) = self.qs.as_chunks::<32>();
        for i in 0..8 {
            let (bytes, shift) = (&pairs[i / 2], i % 2 * 4);
            fill_32(q, i * 32, |j| {
                bytes[j] >> shift & 15 | (self.qh[j] >> i & 1) << 4
            });
        }
    }

    #[inline(always)]
    fn decode_scales(&self, scale: &mut [f32; QK_K / 16], min: &mut [f32; QK_K / 16]) {
        float_scales_and_mins(self.d, self.dmin, &self.scales, scale, min);
    }
}

impl Format for Q6K {
    const BLOCK: usize = QK_K;
    const GROUP: usize = 16;
    const ACTIVATION: ActivationType = ActivationType::Q8K;

    #[inline(always)]
    fn decode_codes(&self, q: &mut [i8; QK_K]) {
        // Each half of the super-block: the low halves of 64 bytes are its first 64 elements, the high halves the rest;
        // each 32 elements have two bits of the same 32 bytes.
        let (low, _) = self.ql.as_chunks::<32>();
        let (high, _) = self.qh.as_chunks::<32>();
        for i in 0..8 {
            let (half, part) = (i / 4, i % 4);
            let (low, high) = (&low[half * 2 + part % 2], &high[half]);
            let code = |j: usize| low[j] >> (part / 2 * 4) & 15 | (high[j] >> (part * 2) & 3) << 4;
            fill_32(q, i * 32, |j| code(j).wrapping_sub(32));
        }
    }

    #[inline(always)]
    fn decode_scales(&self, scale: &mut [f32; QK_K / 16], _min: &mut [f32; QK_K / 16]) {
        let d = self.d.to_f32();
        for (scale, &integer) in scale.iter_mut().zip(&self.scales) {
            *scale = d * f32::from(integer);
        }
    }
}
