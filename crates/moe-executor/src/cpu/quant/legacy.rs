//! Blocks of 32 elements with one scale: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0.
//!
//! The low 4 bits of byte `j` of `qs` belong to element `j`, its high 4 bits to element `j + 16`.

use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

use super::ActivationType;
use super::format::{F16, Format, QK_K};

/// `weight = d * (q - 8)` with 4-bit `q`.
#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Q4_0 {
    pub d: F16,
    pub qs: [u8; 16],
}

/// `weight = d * q + m` with 4-bit `q`.
#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Q4_1 {
    pub d: F16,
    pub m: F16,
    pub qs: [u8; 16],
}

/// `weight = d * (q - 16)` with 5-bit `q`. Bit `j` of `qh` is the highest bit of element `j`.
#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Q5_0 {
    pub d: F16,
    pub qh: [u8; 4],
    pub qs: [u8; 16],
}

/// `weight = d * q + m` with 5-bit `q`, stored like in [`Q5_0`].
#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Q5_1 {
    pub d: F16,
    pub m: F16,
    pub qh: [u8; 4],
    pub qs: [u8; 16],
}

/// `weight = d * q` with signed 8-bit `q`.
#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Q8_0 {
    pub d: F16,
    pub qs: [i8; 32],
}

const _: () = {
    assert!(size_of::<Q4_0>() == 18);
    assert!(size_of::<Q4_1>() == 20);
    assert!(size_of::<Q5_0>() == 22);
    assert!(size_of::<Q5_1>() == 24);
    assert!(size_of::<Q8_0>() == 34);
};

/// Unpacks the two 4-bit codes of each of 16 bytes to 32 elements.
#[inline(always)]
pub fn nibbles(qs: &[u8; 16]) -> [i8; 32] {
    let mut q = [0; 32];
    for j in 0..16 {
        q[j] = (qs[j] & 15) as i8;
        q[j + 16] = (qs[j] >> 4) as i8;
    }
    q
}

/// Like [`nibbles`], with bit `j` of `qh` as the highest bit of element `j`.
#[inline(always)]
fn five_bits(qs: &[u8; 16], qh: [u8; 4]) -> [i8; 32] {
    let mut q = nibbles(qs);
    for (j, q) in q.iter_mut().enumerate() {
        *q |= (qh[j / 8] >> (j % 8) << 4 & 16) as i8;
    }
    q
}

impl Format for Q4_0 {
    const BLOCK: usize = 32;
    const GROUP: usize = 32;
    const ACTIVATION: ActivationType = ActivationType::Q8_0;

    #[inline(always)]
    fn decode_codes(&self, q: &mut [i8; QK_K]) {
        let codes = nibbles(&self.qs).map(|code| code - 8);
        q[..32].copy_from_slice(&codes);
    }

    #[inline(always)]
    fn decode_scales(&self, scale: &mut [f32; QK_K / 16], _min: &mut [f32; QK_K / 16]) {
        scale[0] = self.d.to_f32();
    }
}

impl Format for Q4_1 {
    const BLOCK: usize = 32;
    const GROUP: usize = 32;
    const ACTIVATION: ActivationType = ActivationType::Q8_1;
    const MIN: bool = true;

    #[inline(always)]
    fn decode_codes(&self, q: &mut [i8; QK_K]) {
        q[..32].copy_from_slice(&nibbles(&self.qs));
    }

    #[inline(always)]
    fn decode_scales(&self, scale: &mut [f32; QK_K / 16], min: &mut [f32; QK_K / 16]) {
        scale[0] = self.d.to_f32();
        min[0] = -self.m.to_f32();
    }
}

impl Format for Q5_0 {
    const BLOCK: usize = 32;
    const GROUP: usize = 32;
    const ACTIVATION: ActivationType = ActivationType::Q8_0;

    #[inline(always)]
    fn decode_codes(&self, q: &mut [i8; QK_K]) {
        let codes = five_bits(&self.qs, self.qh).map(|code| code - 16);
        q[..32].copy_from_slice(&codes);
    }

    #[inline(always)]
    fn decode_scales(&self, scale: &mut [f32; QK_K / 16], _min: &mut [f32; QK_K / 16]) {
        scale[0] = self.d.to_f32();
    }
}

impl Format for Q5_1 {
    const BLOCK: usize = 32;
    const GROUP: usize = 32;
    const ACTIVATION: ActivationType = ActivationType::Q8_1;
    const MIN: bool = true;

    #[inline(always)]
    fn decode_codes(&self, q: &mut [i8; QK_K]) {
        q[..32].copy_from_slice(&five_bits(&self.qs, self.qh));
    }

    #[inline(always)]
    fn decode_scales(&self, scale: &mut [f32; QK_K / 16], min: &mut [f32; QK_K / 16]) {
        scale[0] = self.d.to_f32();
        min[0] = -self.m.to_f32();
    }
}

impl Format for Q8_0 {
    const BLOCK: usize = 32;
    const GROUP: usize = 32;
    const ACTIVATION: ActivationType = ActivationType::Q8_0;

    #[inline(always)]
    fn decode_codes(&self, q: &mut [i8; QK_K]) {
        q[..32].copy_from_slice(&self.qs);
    }

    #[inline(always)]
    fn decode_scales(&self, scale: &mut [f32; QK_K / 16], _min: &mut [f32; QK_K / 16]) {
        scale[0] = self.d.to_f32();
    }
}
