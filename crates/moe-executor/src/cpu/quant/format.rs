//! What a block format has to tell: its layout and how its codes become numbers.

use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

use super::ActivationType;

/// Elements of the longest block: a super-block of the K and IQ formats.
pub const QK_K: usize = 256;

/// One block of a quantized row, laid out byte for byte as in a GGUF file.
///
/// Every format here is, inside a group of [`Format::GROUP`] elements, an affine map of small integers:
/// `weight = scale * q - min`. That is all a product needs to know.
pub trait Format: FromBytes + Immutable + KnownLayout + Unaligned + Sized {
    /// Elements in a block.
    const BLOCK: usize;
    /// Elements that share a scale: 16 or 32.
    const GROUP: usize;
    /// What ggml multiplies the blocks with.
    const ACTIVATION: ActivationType;
    /// Whether groups have a minimum. If so, `q` is never negative.
    const MIN: bool = false;

    /// Decodes the integer codes.
    fn decode_codes(&self, q: &mut [i8; QK_K]);

    /// Decodes the scale of each group, and its minimum if [`Format::MIN`].
    fn decode_scales(&self, scale: &mut [f32; QK_K / 16], min: &mut [f32; QK_K / 16]);

    /// Decodes the block.
    #[inline(always)]
    fn unpack(&self, out: &mut Unpacked) {
        self.decode_codes(&mut out.q);
        self.decode_scales(&mut out.scale, &mut out.min);
    }
}

/// A super-block whose codes come in groups of eight that do not depend on one another.
pub trait Codebook {
    /// Group `i` of 32.
    fn group(&self, i: usize) -> [i8; 8];
}

/// [`Format::decode_codes`] of a [`Codebook`].
#[inline(always)]
pub fn decode_groups(block: &impl Codebook, q: &mut [i8; QK_K]) {
    let (groups, _) = q.as_chunks_mut::<8>();
    for (i, group) in groups.iter_mut().enumerate() {
        *group = block.group(i);
    }
}

/// A decoded block; formats with shorter blocks use the front of each array.
pub struct Unpacked {
    /// The integer codes, in the order of the row's elements.
    pub q: [i8; QK_K],
    /// The scale of each group.
    pub scale: [f32; QK_K / 16],
    /// What is subtracted in each group; zero unless the format has minima.
    pub min: [f32; QK_K / 16],
}

impl Unpacked {
    /// All zero.
    pub const fn new() -> Unpacked {
        Unpacked {
            q: [0; QK_K],
            scale: [0.0; QK_K / 16],
            min: [0.0; QK_K / 16],
        }
    }
}

/// An IEEE half-precision number as it lies in a block.
#[derive(Clone, Copy, FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(transparent)]
pub struct F16([u8; 2]);

impl F16 {
    /// The bits.
    #[inline(always)]
    pub fn bits(self) -> u16 {
        u16::from_le_bytes(self.0)
    }

    /// The value, exactly.
    #[inline(always)]
    pub fn to_f32(self) -> f32 {
        f16_to_f32(self.bits())
    }
}

/// Widens half-precision bits without a branch, so that loops over it become vector code.
#[inline(always)]
pub fn f16_to_f32(bits: u16) -> f32 {
    let bits = u32::from(bits);
    let sign = (bits & 0x8000) << 16;
    // The exponent's bias differs by 112; a multiplication corrects it for subnormal numbers too.
    let magnitude = f32::from_bits((bits & 0x7fff) << 13) * f32::from_bits((127 + 112) << 23);
    let not_finite = if bits & 0x7c00 == 0x7c00 {
        0x7f80_0000
    } else {
        0
    };
    f32::from_bits(magnitude.to_bits() | not_finite | sign)
}

/// Widens a bfloat16, whose bits are the upper half of an `f32`'s.
#[inline(always)]
pub fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}
