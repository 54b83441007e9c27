//! 4-bit indices of a table of non-uniform values: IQ4_NL, IQ4_XS.

use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

use super::ActivationType;
use super::format::{F16, Format, QK_K};
use super::legacy::nibbles;

/// The value of each index: `kvalues_iq4nl` in ggml.
pub const IQ4_VALUES: [i8; 16] = [
    -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113,
];

/// IQ4_NL: 32 elements with one scale, stored like in Q4_0.
#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Iq4Nl {
    pub d: F16,
    pub qs: [u8; 16],
}

/// IQ4_XS: 256 elements; 32 elements have a 6-bit scale with an offset of 32, with the upper two bits in `scales_h`.
#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Iq4Xs {
    pub d: F16,
    pub scales_h: [u8; 2],
    pub scales_l: [u8; 4],
    pub qs: [u8; 128],
}

const _: () = {
    assert!(size_of::<Iq4Nl>() == 18);
    assert!(size_of::<Iq4Xs>() == 136);
};

impl Iq4Xs {
    /// The integer scales of the groups, -32 to 31.
    #[inline(always)]
    pub fn integer_scales(&self) -> [i8; 8] {
        let high = u16::from_le_bytes(self.scales_h);
        std::array::from_fn(|i| {
            let low = self.scales_l[i / 2] >> (i % 2 * 4) & 15;
            let upper = (high >> (2 * i) & 3) as u8;
            (low | upper << 4) as i8 - 32
        })
    }
}

impl Format for Iq4Nl {
    const BLOCK: usize = 32;
    const GROUP: usize = 32;
    const ACTIVATION: ActivationType = ActivationType::Q8_0;

    #[inline(always)]
    fn decode_codes(&self, q: &mut [i8; QK_K]) {
        let codes = nibbles(&self.qs).map(|code| IQ4_VALUES[code as usize]);
        q[..32].copy_from_slice(&codes);
    }

    #[inline(always)]
    fn decode_scales(&self, scale: &mut [f32; QK_K / 16], _min: &mut [f32; QK_K / 16]) {
        scale[0] = self.d.to_f32();
    }
}

impl Format for Iq4Xs {
    const BLOCK: usize = QK_K;
    const GROUP: usize = 32;
    const ACTIVATION: ActivationType = ActivationType::Q8K;

    #[inline(always)]
    fn decode_codes(&self, q: &mut [i8; QK_K]) {
        let (bytes, _) = self.qs.as_chunks::<16>();
        for (q, bytes) in q.chunks_exact_mut(32).zip(bytes) {
            q.copy_from_slice(&nibbles(bytes).map(|code| IQ4_VALUES[code as usize]));
        }
    }

    #[inline(always)]
    fn decode_scales(&self, scale: &mut [f32; QK_K / 16], _min: &mut [f32; QK_K / 16]) {
        let d = self.d.to_f32();
        for (scale, integer) in scale.iter_mut().zip(self.integer_scales()) {
            *scale = d * f32::from(integer);
        }
    }
}
