//! Floating-point formats without blocks: F32, F16, BF16.

use zerocopy::byteorder::little_endian::{F32, U16};
use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

use super::ActivationType;
use super::format::{F16, bf16_to_f32};

/// A floating-point element with the memory layout of GGUF files.
pub trait FloatFormat: FromBytes + Immutable + KnownLayout + Unaligned + Copy {
    /// The type that ggml rounds activations to before the product.
    const ACTIVATION: ActivationType;

    /// The value, exactly.
    fn to_f32(self) -> f32;

    /// The elements of a row.
    #[inline(always)]
    fn elements(row: &[u8]) -> &[Self] {
        <[Self]>::ref_from_bytes(row).expect("the size of a row is a multiple of the element size")
    }
}

/// A bfloat16 number: the upper half of an `f32`.
#[derive(Clone, Copy, FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(transparent)]
pub struct Bf16(U16);

impl FloatFormat for F32 {
    const ACTIVATION: ActivationType = ActivationType::F32;

    #[inline(always)]
    fn to_f32(self) -> f32 {
        self.get()
    }
}

impl FloatFormat for F16 {
    const ACTIVATION: ActivationType = ActivationType::F16;

    #[inline(always)]
    fn to_f32(self) -> f32 {
        F16::to_f32(self)
    }
}

impl FloatFormat for Bf16 {
    const ACTIVATION: ActivationType = ActivationType::Bf16;

    #[inline(always)]
    fn to_f32(self) -> f32 {
        bf16_to_f32(self.0.get())
    }
}
