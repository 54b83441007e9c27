//! Blocks of 4-bit floating-point numbers (E2M1) with a power-of-two or an 8-bit floating-point scale: MXFP4, NVFP4.
//!
//! The numbers 0, 0.5, 1, 1.5, 2, 3, 4, 6 are held doubled, as integers, and the scales halved.

use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

use super::ActivationType;
use super::format::{Format, QK_K};
use super::legacy::nibbles;

/// Twice the value of each E2M1 code.
pub const E2M1_DOUBLED: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// OCP microscaling: 32 elements with one E8M0 scale.
#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Mxfp4 {
    pub e: u8,
    pub qs: [u8; 16],
}

/// 64 elements, each 16 of them with an unsigned E4M3 scale.
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

/// Half of each E8M0 number `2^(e - 127)`. The two smallest are subnormal; 255 (a NaN in the standard) is taken as a
/// number, as ggml does.
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

/// Half of each unsigned E4M3 number; 0x7f (a NaN in the standard) is zero, and the top bit is ignored, as in ggml.
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
        // Each eight bytes hold the low halves of eight elements and the high halves of the next eight.
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
