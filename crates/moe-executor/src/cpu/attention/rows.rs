//! Keys and values of a cache in their types, decoded to f32 for a block of positions.

use zerocopy::{FromBytes, Immutable, KnownLayout};

use crate::cpu::quant::f16_to_f32;
use crate::cpu::simd::Simd;

/// Keys or values of a sequence `(position, n_head_kv, head_dim)` with a stride between positions.
#[derive(Clone, Copy, Debug)]
pub enum Rows<'a> {
    /// 32-bit floating point.
    F32(&'a [f32]),
    /// Bits of half-precision numbers.
    F16(&'a [u16]),
    /// Blocks of 32 elements of a head.
    Q8_0(&'a [Q8Block]),
}

/// A block of 32 elements, `element = scale * code`, with the memory layout of ggml's Q8_0.
#[derive(Clone, Copy, Debug, FromBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Q8Block {
    /// Bits of the scale in half precision.
    scale: u16,
    codes: [i8; 32],
}

const _: () = assert!(size_of::<Q8Block>() == 34);

impl<'a> Rows<'a> {
    /// The elements of some positions as f32, and the distance between two positions. `first` is the first element, a multiple
    /// of the block size of the type; a position has `d` elements, and two positions are `stride` elements apart. Types other
    /// than F32 are decoded to `decoded`.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`.
    #[inline(always)]
    pub unsafe fn decode<'c, S: Simd>(
        self,
        first: usize,
        stride: usize,
        [positions, d]: [usize; 2],
        decoded: &'c mut Vec<f32>,
    ) -> (&'c [f32], usize)
    where
        'a: 'c,
    {
        if let Rows::F32(elements) = self {
            return (&elements[first..], stride);
        }
        decoded.resize(decoded.len().max(positions * d), 0.0);
        for (i, out) in decoded.chunks_exact_mut(d).take(positions).enumerate() {
            let at = first + i * stride;
            // SAFETY: by the contract of this function.
            unsafe {
                match self {
                    Rows::F32(_) => {}
                    Rows::F16(bits) => decode_f16::<S>(&bits[at..][..d], out),
                    Rows::Q8_0(blocks) => {
                        for (block, out) in blocks[at / 32..].iter().zip(out.chunks_exact_mut(32)) {
                            decode_q8_0::<S>(block, out);
                        }
                    }
                }
            }
        }
        (decoded, d)
    }
}

/// Decodes half-precision numbers.
///
/// # Safety
/// The CPU has the instructions of `S`, and the slices have the same length.
#[inline(always)]
unsafe fn decode_f16<S: Simd>(bits: &[u16], out: &mut [f32]) {
    let vectors = out.len() / S::LANES * S::LANES;
    for at in (0..vectors).step_by(S::LANES) {
        // SAFETY: both slices have `LANES` values at `at`; the instructions by the contract of this function.
        unsafe { S::store(out.as_mut_ptr().add(at), S::load_f16(bits.as_ptr().add(at))) };
    }
    for (out, bits) in out.iter_mut().zip(bits).skip(vectors) {
        *out = f16_to_f32(*bits);
    }
}

/// Decodes a block to the 32 values of `out`.
///
/// # Safety
/// The CPU has the instructions of `S`, and `out` has 32 values, a multiple of `LANES`.
#[inline(always)]
unsafe fn decode_q8_0<S: Simd>(block: &Q8Block, out: &mut [f32]) {
    // SAFETY: the block and `out` have 32 values; the instructions by the contract of this function.
    unsafe {
        let scale = S::splat(f16_to_f32(block.scale));
        for at in (0..32).step_by(S::LANES) {
            let codes = S::load_i8(block.codes.as_ptr().add(at));
            S::store(out.as_mut_ptr().add(at), S::mul(scale, codes));
        }
    }
}
