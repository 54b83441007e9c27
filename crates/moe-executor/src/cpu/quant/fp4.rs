//! Blocks of 4-bit floating-point numbers (E2M1) with 8-bit floating-point scales: MXFP4, NVFP4.
//!
//! The values 0, 0.5, 1, 1.5, 2, 3, 4, 6 are doubled, so that the codes are integers, and the scales are halved.

use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

use super::ActivationType;
use super::format::{Format, QK_K};
use super::legacy::nibbles;

/// Twice the value of each E2M1 code; the highest bit of the code is the sign.
pub const E2M1_DOUBLED: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// 32 elements with one E8M0 (power of two) scale ("OCP Microscaling Formats (MX) Specification", 2023).
#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Mxfp4 {
    pub e: u8,
    pub qs: [u8; 16],
}

/// 64 elements in groups of 16 with an unsigned E4M3 scale per group (NVIDIA).
#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Nvfp4 {
    pub d: [u8; 4],
    pub qs: [u8; 32],
}

const _: () = {
    assert!(size_of::<Mxfp4>() == 17);
    assert!(size_of::<Nvfp4>() == 36);
};

/// Half of each E8M0 number `2^(e - 127)`. The two smallest are subnormal. Like in ggml, 255 is a number (NaN in the
/// standard).
pub static E8M0_HALVED: [f32; 256] = {
    let mut table = [0.0; 256];
    let mut e = 0;
    while e < 256 {
        table[e as usize] = f32::from_bits(if e < 2 {
            0x0020_0000 << e
        } else {
            (e - 1) << 23
        });
        e += 1;
    }
    table
};

/// Half of each unsigned E4M3 number. Like in ggml, 0x7f (NaN in the standard) is 0, and the highest bit is ignored.
pub static UE4M3_HALVED: [f32; 256] = {
    let mut table = [0.0; 256];
    let mut bits = 0u32;
    while bits < 256 {
        let (exponent, mantissa) = (bits >> 3 & 15, (bits & 7) as f32);
        table[bits as usize] = match (bits, exponent) {
            (0x7f, _) => 0.0,
            (_, 0) => mantissa / 1024.0,
            _ => (1.0 + mantissa / 8.0) * f32::from_bits((exponent + 127 - 8) << 23),
        };
        bits += 1;
    }
    table
};

impl Format for Mxfp4 {
    const BLOCK: usize = 32;
    const GROUP: usize = 32;
    const ACTIVATION: ActivationType = ActivationType::Q8_0;

    #[inline(always)]
    fn decode_codes(&self, q: &mut [i8; QK_K]) {
        let codes = nibbles(&self.qs).map(|code| E2M1_DOUBLED[code as usize]);
        q[..32].copy_from_slice(&codes);
    }

    #[inline(always)]
    fn decode_scales(&self, scale: &mut [f32; QK_K / 16], _min: &mut [f32; QK_K / 16]) {
        scale[0] = E8M0_HALVED[usize::from(self.e)];
    }
}

impl Format for Nvfp4 {
    const BLOCK: usize = 64;
    const GROUP: usize = 16;
    const ACTIVATION: ActivationType = ActivationType::Q8_0;

    #[inline(always)]
    fn decode_codes(&self, q: &mut [i8; QK_K]) {
        // The low halves of each eight bytes belong to the first eight elements of a group, the high halves to the others.
        let (groups, _) = self.qs.as_chunks::<8>();
        for (q, bytes) in q.chunks_exact_mut(16).zip(groups) {
            for j in 0..8 {
                q[j] = E2M1_DOUBLED[usize::from(bytes[j] & 15)];
                q[j + 8] = E2M1_DOUBLED[usize::from(bytes[j] >> 4)];
            }
        }
    }

    #[inline(always)]
    fn decode_scales(&self, scale: &mut [f32; QK_K / 16], _min: &mut [f32; QK_K / 16]) {
        for (scale, &d) in scale.iter_mut().zip(&self.d) {
            *scale = UE4M3_HALVED[usize::from(d)];
        }
    }
}
