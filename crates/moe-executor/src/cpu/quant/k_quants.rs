//! Super-blocks of 256 elements whose groups have small integer scales of their own: Q2_K to Q6_K.

use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

use super::ActivationType;
use super::format::{F16, Format, QK_K, Unpacked};

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

impl Format for Q2K {
    const BLOCK: usize = QK_K;
    const GROUP: usize = 16;
    const ACTIVATION: ActivationType = ActivationType::Q8K;
    const MIN: bool = true;

    #[inline(always)]
    fn unpack(&self, out: &mut Unpacked) {
        // Each half of the super-block has 32 bytes, which hold four times 32 elements.
        for half in 0..2 {
            for part in 0..4 {
                for j in 0..32 {
                    out.q[half * 128 + part * 32 + j] =
                        (self.qs[half * 32 + j] >> (2 * part) & 3) as i8;
                }
            }
        }
        let (d, dmin) = (self.d.to_f32(), self.dmin.to_f32());
        for group in 0..16 {
            out.scale[group] = d * f32::from(self.scales[group] & 15);
            out.min[group] = dmin * f32::from(self.scales[group] >> 4);
        }
    }
}

impl Format for Q3K {
    const BLOCK: usize = QK_K;
    const GROUP: usize = 16;
    const ACTIVATION: ActivationType = ActivationType::Q8K;

    #[inline(always)]
    fn unpack(&self, out: &mut Unpacked) {
        for half in 0..2 {
            for part in 0..4 {
                for j in 0..32 {
                    let low = self.qs[half * 32 + j] >> (2 * part) & 3;
                    let high = self.hmask[j] >> (half * 4 + part) & 1;
                    out.q[half * 128 + part * 32 + j] = (low | high << 2) as i8 - 4;
                }
            }
        }
        let d = self.d.to_f32();
        let scales = q3_k_scales(&self.scales);
        for (out, scale) in out.scale.iter_mut().zip(scales) {
            *out = d * (f32::from(scale) - 32.0);
        }
    }
}

impl Format for Q4K {
    const BLOCK: usize = QK_K;
    const GROUP: usize = 32;
    const ACTIVATION: ActivationType = ActivationType::Q8K;
    const MIN: bool = true;

    #[inline(always)]
    fn unpack(&self, out: &mut Unpacked) {
        for pair in 0..4 {
            for j in 0..32 {
                let byte = self.qs[pair * 32 + j];
                out.q[pair * 64 + j] = (byte & 15) as i8;
                out.q[pair * 64 + 32 + j] = (byte >> 4) as i8;
            }
        }
        unpack_scales(self.d, self.dmin, &self.scales, out);
    }
}

impl Format for Q5K {
    const BLOCK: usize = QK_K;
    const GROUP: usize = 32;
    const ACTIVATION: ActivationType = ActivationType::Q8K;
    const MIN: bool = true;

    #[inline(always)]
    fn unpack(&self, out: &mut Unpacked) {
        for pair in 0..4 {
            for j in 0..32 {
                let byte = self.qs[pair * 32 + j];
                let high = self.qh[j] >> (2 * pair);
                out.q[pair * 64 + j] = (byte & 15 | (high & 1) << 4) as i8;
                out.q[pair * 64 + 32 + j] = (byte >> 4 | (high >> 1 & 1) << 4) as i8;
            }
        }
        unpack_scales(self.d, self.dmin, &self.scales, out);
    }
}

#[inline(always)]
fn unpack_scales(d: F16, dmin: F16, packed: &[u8; 12], out: &mut Unpacked) {
    let (d, dmin) = (d.to_f32(), dmin.to_f32());
    let (scales, mins) = scales_and_mins(packed);
    for group in 0..8 {
        out.scale[group] = d * f32::from(scales[group]);
        out.min[group] = dmin * f32::from(mins[group]);
    }
}

impl Format for Q6K {
    const BLOCK: usize = QK_K;
    const GROUP: usize = 16;
    const ACTIVATION: ActivationType = ActivationType::Q8K;

    #[inline(always)]
    fn unpack(&self, out: &mut Unpacked) {
        // Each half: the low halves of 64 bytes are elements 0..64, the high halves elements 64..128.
        for half in 0..2 {
            let ql = &self.ql[half * 64..][..64];
            let qh = &self.qh[half * 32..][..32];
            let q = &mut out.q[half * 128..][..128];
            for j in 0..32 {
                q[j] = (ql[j] & 15 | (qh[j] & 3) << 4) as i8 - 32;
                q[j + 32] = (ql[j + 32] & 15 | (qh[j] >> 2 & 3) << 4) as i8 - 32;
                q[j + 64] = (ql[j] >> 4 | (qh[j] >> 4 & 3) << 4) as i8 - 32;
                q[j + 96] = (ql[j + 32] >> 4 | (qh[j] >> 6) << 4) as i8 - 32;
            }
        }
        let d = self.d.to_f32();
        for group in 0..16 {
            out.scale[group] = d * f32::from(self.scales[group]);
        }
    }
}
