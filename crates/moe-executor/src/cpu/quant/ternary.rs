//! Super-blocks of the values -1, 0 and 1 with one scale: TQ1_0, TQ2_0.

use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

use super::ActivationType;
use super::format::{F16, Format, QK_K};

/// TQ1_0: a byte of `qs` has five base-3 digits, a byte of `qh` four.
///
/// The byte is a fixed-point fraction: the five-digit number times 256 / 243, rounded up.
#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Tq1_0 {
    pub qs: [u8; 48],
    pub qh: [u8; 4],
    pub d: F16,
}

/// TQ2_0: a byte has four 2-bit codes.
#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Tq2_0 {
    pub qs: [u8; 64],
    pub d: F16,
}

const _: () = {
    assert!(size_of::<Tq1_0>() == 54);
    assert!(size_of::<Tq2_0>() == 66);
};

/// Unpacks `digits` base-3 digits of each byte: digit `n` of byte `j` is element `n * BYTES + j`.
#[inline(always)]
fn base_3<const BYTES: usize>(q: &mut [i8], bytes: &[u8; BYTES], digits: usize) {
    let mut fractions = *bytes;
    for run in q.chunks_exact_mut(BYTES).take(digits) {
        for (q, fraction) in run.iter_mut().zip(&mut fractions) {
            // The integer part of three times the fraction is the digit; its fractional part contains the digits after it.
            let thrice = u16::from(*fraction) * 3;
            *q = (thrice >> 8) as i8 - 1;
            *fraction = thrice as u8;
        }
    }
}

impl Format for Tq1_0 {
    const BLOCK: usize = QK_K;
    const GROUP: usize = 32;
    const ACTIVATION: ActivationType = ActivationType::Q8K;

    #[inline(always)]
    fn decode_codes(&self, q: &mut [i8; QK_K]) {
        let (first, second) = self.qs.split_at(32);
        let (first, _) = first.as_chunks::<32>();
        let (second, _) = second.as_chunks::<16>();
        base_3(&mut q[..160], &first[0], 5);
        base_3(&mut q[160..240], &second[0], 5);
        base_3(&mut q[240..], &self.qh, 4);
    }

    #[inline(always)]
    fn decode_scales(&self, scale: &mut [f32; QK_K / 16], _min: &mut [f32; QK_K / 16]) {
        scale[..8].fill(self.d.to_f32());
    }
}

impl Format for Tq2_0 {
    const BLOCK: usize = QK_K;
    const GROUP: usize = 32;
    const ACTIVATION: ActivationType = ActivationType::Q8K;

    #[inline(always)]
    fn decode_codes(&self, q: &mut [i8; QK_K]) {
        let (halves, _) = self.qs.as_chunks::<32>();
        for (i, q) in q.chunks_exact_mut(32).enumerate() {
            let (bytes, shift) = (&halves[i / 4], i % 4 * 2);
            for (q, byte) in q.iter_mut().zip(bytes) {
                *q = (byte >> shift & 3) as i8 - 1;
            }
        }
    }

    #[inline(always)]
    fn decode_scales(&self, scale: &mut [f32; QK_K / 16], _min: &mut [f32; QK_K / 16]) {
        scale[..8].fill(self.d.to_f32());
    }
}
