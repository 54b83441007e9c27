//! Super-blocks of 256 elements with integer scales per group: Q2_K, Q3_K, Q4_K, Q5_K, Q6_K.
//!
//! The weight of an element is `d * scale * q - dmin * min`, with the integer scale and minimum of its group.

use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

use super::ActivationType;
use super::format::{F16, Format, QK_K};

/// 2-bit codes in groups of 16. A byte of `scales` has the 4-bit scale of a group in its low half and the 4-bit minimum in its
/// high half.
#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Q2K {
    pub scales: [u8; 16],
    pub qs: [u8; 64],
    pub d: F16,
    pub dmin: F16,
}

/// 3-bit codes minus 4 in groups of 16, with the highest bit in `hmask`. The scales have 6 bits and an offset of 32.
#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Q3K {
    pub hmask: [u8; 32],
    pub qs: [u8; 64],
    pub scales: [u8; 12],
    pub d: F16,
}

/// 4-bit codes in groups of 32, with a 6-bit scale and a 6-bit minimum per group.
#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Q4K {
    pub d: F16,
    pub dmin: F16,
    pub scales: [u8; 12],
    pub qs: [u8; 128],
}

/// 5-bit codes in groups of 32, with the highest bit in `qh`. Scales and minima are stored like in Q4_K.
#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Q5K {
    pub d: F16,
    pub dmin: F16,
    pub scales: [u8; 12],
    pub qh: [u8; 32],
    pub qs: [u8; 128],
}

/// 6-bit codes minus 32 in groups of 16, with the upper two bits in `qh`. The scales have 8 bits with a sign.
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

/// The eight 6-bit scales and the eight 6-bit minima of Q4_K and Q5_K.
///
/// The low six bits of bytes 0..4 are the first four scales, those of bytes 4..8 the first four minima. For the last four,
/// byte `8 + i` has the low four bits of the scale (low half) and of the minimum (high half), and the upper two bits are the
/// upper two bits of bytes `i` and `4 + i`.
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

/// The sixteen 6-bit scales of Q3_K, including their offset of 32.
///
/// Bytes 0..8 have the low four bits of the first eight scales in their low halves, and those of the last eight scales in their
/// high halves. Byte `8 + j % 4` has the upper two bits of scale `j` at bit `2 * (j / 4)`.
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

/// The scales and minima of Q4_K and Q5_K, multiplied by `d` and `dmin`.
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
        // Each half of the super-block has 32 bytes: bits `2 * i` and `2 * i + 1` of byte `j` belong to element `32 * i + j`.
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
        // The low two bits are stored like in Q2_K. Bit `i` of `hmask[j]` belongs to element `32 * i + j`.
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
        // In each half of the super-block, the low halves of 64 bytes of `ql` belong to the first 64 elements, the high halves
        // to the other 64. Bits `2 * p` and `2 * p + 1` of 32 bytes of `qh` belong to elements `32 * p` to `32 * p + 31`.
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
