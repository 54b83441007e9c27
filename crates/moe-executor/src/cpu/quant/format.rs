//! The traits of block formats: memory layout, codes and scales; conversion of half-precision numbers.

use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

use super::ActivationType;

/// Elements of the longest block: a super-block of the K and IQ formats, `QK_K` in ggml.
pub const QK_K: usize = 256;

/// A block of a quantized row with the memory layout of GGUF files.
///
/// In all formats, the weights of a group of [`Format::GROUP`] elements are an affine function of small integer codes:
/// `weight = scale * q - min`. Products use only the codes, scales and minima.
pub trait Format: FromBytes + Immutable + KnownLayout + Unaligned + Sized {
    /// Elements in a block.
    const BLOCK: usize;
    /// Elements that share a scale: 16 or 32.
    const GROUP: usize;
    /// The type of activations that ggml multiplies the blocks with.
    const ACTIVATION: ActivationType;
    /// Whether groups have a minimum. Then `q` is not negative.
    const MIN: bool = false;

    /// Decodes the integer codes.
    fn decode_codes(&self, q: &mut [i8; QK_K]);

    /// Decodes the scale of each group, and its minimum if [`Format::MIN`] is true.
    fn decode_scales(&self, scale: &mut [f32; QK_K / 16], min: &mut [f32; QK_K / 16]);

    /// Decodes the block.
    #[inline(always)]
    fn unpack(&self, out: &mut Unpacked) {
        self.decode_codes(&mut out.q);
        self.decode_scales(&mut out.scale, &mut out.min);
    }
}

/// A super-block that encodes its elements in 32 independent groups of eight.
pub trait Codebook {
    /// The codes of elements `8 * i` to `8 * i + 7`.
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

/// A decoded block. Formats with shorter blocks use the start of each array.
pub struct Unpacked {
    /// The integer codes, in the order of the row's elements.
    pub q: [i8; QK_K],
    /// The scale of each group.
    pub scale: [f32; QK_K / 16],
    /// The minimum of each group, which is subtracted; 0 for formats without minima.
    pub min: [f32; QK_K / 16],
}

impl Unpacked {
    /// A block of zeros.
    pub const fn new() -> Unpacked {
        Unpacked {
            q: [0; QK_K],
            scale: [0.0; QK_K / 16],
            min: [0.0; QK_K / 16],
        }
    }
}

/// An IEEE 754 half-precision number in a block, little-endian without alignment.
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

/// Converts half-precision bits to f32 without branches, so that the compiler can vectorize loops.
#[inline(always)]
pub fn f16_to_f32(bits: u16) -> f32 {
    let bits = u32::from(bits);
    let sign = (bits & 0x8000) << 16;
    // The exponent biases differ by 112. The multiplication corrects this for subnormal numbers, too.
    let magnitude = f32::from_bits((bits & 0x7fff) << 13) * f32::from_bits((127 + 112) << 23);
    let not_finite = if bits & 0x7c00 == 0x7c00 {
        0x7f80_0000
    } else {
        0
    };
    f32::from_bits(magnitude.to_bits() | not_finite | sign)
}

/// Converts bfloat16 bits, which are the upper half of the bits of an `f32`.
#[inline(always)]
pub fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}
