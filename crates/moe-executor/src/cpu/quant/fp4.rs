//! Blocks of 4-bit floating-point numbers (E2M1) with a power-of-two or an 8-bit floating-point scale: MXFP4, NVFP4.
//!
//! The numbers 0, 0.5, 1, 1.5, 2, 3, 4, 6 are held doubled, as integers, and the scales halved.

use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

use super::ActivationType;
use super::format::{Format, Unpacked};

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

/// Half of the E8M0 number `2^(e - 127)`. The two smallest are subnormal; 255 (a NaN in the standard) is taken as a
/// number, as ggml does.
#[inline(always)]
pub fn e8m0_halved(e: u8) -> f32 {
    let e = u32::from(e);
    f32::from_bits(if e < 2 {
        0x0020_0000 << e
    } else {
        (e - 1) << 23
    })
}

/// Half of the unsigned E4M3 number; 0x7f (a NaN in the standard) is zero, as in ggml.
#[inline(always)]
pub fn ue4m3_halved(bits: u8) -> f32 {
    if bits == 0x7f {
        return 0.0;
    }
    let (exponent, mantissa) = (u32::from(bits >> 3 & 15), f32::from(bits & 7));
    if exponent == 0 {
        mantissa / 1024.0
    } else {
        (1.0 + mantissa / 8.0) * f32::from_bits((exponent + 127 - 8) << 23)
    }
}

impl Format for Mxfp4 {
    const BLOCK: usize = 32;
    const GROUP: usize = 32;
    const ACTIVATION: ActivationType = ActivationType::Q8_0;

    #[inline(always)]
    fn unpack(&self, out: &mut Unpacked) {
        for j in 0..16 {
            out.q[j] = E2M1_DOUBLED[usize::from(self.qs[j] & 15)];
            out.q[j + 16] = E2M1_DOUBLED[usize::from(self.qs[j] >> 4)];
        }
        out.scale[0] = e8m0_halved(self.e);
    }
}

impl Format for Nvfp4 {
    const BLOCK: usize = 64;
    const GROUP: usize = 16;
    const ACTIVATION: ActivationType = ActivationType::Q8_0;

    #[inline(always)]
    fn unpack(&self, out: &mut Unpacked) {
        for group in 0..4 {
            for j in 0..8 {
                let byte = self.qs[group * 8 + j];
                out.q[group * 16 + j] = E2M1_DOUBLED[usize::from(byte & 15)];
                out.q[group * 16 + j + 8] = E2M1_DOUBLED[usize::from(byte >> 4)];
            }
            out.scale[group] = ue4m3_halved(self.d[group]);
        }
    }
}
