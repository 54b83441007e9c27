//! Kernels with x86 vector instructions.
//!
//! The functions have `#[target_feature]` attributes; [`super::Kernel::for_isa`] selects only those that the CPU supports.

// Loops over lanes index several arrays at once.
#![allow(clippy::needless_range_loop)]

pub mod avx2;
mod avx512;

use moe_gguf::GgmlType as T;
use zerocopy::byteorder::little_endian::F32;

use super::float::Bf16;
use super::format::F16;
use super::{Gemm, Isa, Stream};

/// The product that streams the rows, for a type and instruction set; `None` for portable code.
pub fn stream(ty: T, isa: Isa) -> Option<Stream> {
    match (isa, ty) {
        (Isa::Portable, _) => None,
        (Isa::Avx2, T::F32) => Some(avx2::stream_float::<F32>),
        (Isa::Avx2, T::F16) => Some(avx2::stream_float::<F16>),
        (Isa::Avx2, T::BF16) => Some(avx2::stream_float::<Bf16>),
        (Isa::Avx2, _) => with_format!(ty, F => avx2::stream::<F> as Stream),
        (Isa::Avx512, T::F32) => Some(avx512::stream_float::<F32>),
        (Isa::Avx512, T::F16) => Some(avx512::stream_float::<F16>),
        (Isa::Avx512, T::BF16) => Some(avx512::stream_float::<Bf16>),
        (Isa::Avx512, _) => with_format!(ty, F => avx512::stream::<F> as Stream),
    }
}

/// The product that decodes the weights into panels, for a type and instruction set; `None` for portable code.
pub fn gemm(ty: T, isa: Isa) -> Option<Gemm> {
    match (isa, ty) {
        (Isa::Portable, _) => None,
        (Isa::Avx2, T::F32) => Some(avx2::gemm_float::<F32>),
        (Isa::Avx2, T::F16) => Some(avx2::gemm_float::<F16>),
        (Isa::Avx2, T::BF16) => Some(avx2::gemm_float::<Bf16>),
        (Isa::Avx2, _) => with_format!(ty, F => avx2::gemm::<F> as Gemm),
        (Isa::Avx512, T::F32) => Some(avx512::gemm_float::<F32>),
        (Isa::Avx512, T::F16) => Some(avx512::gemm_float::<F16>),
        (Isa::Avx512, T::BF16) if is_x86_feature_detected!("avx512bf16") => Some(avx512::gemm_bf16),
        (Isa::Avx512, T::BF16) => Some(avx512::gemm_float::<Bf16>),
        (Isa::Avx512, _) => with_format!(ty, F => avx512::gemm::<F> as Gemm),
    }
}

/// Whether this CPU has the instructions of [`super::Isa::Avx2`].
pub fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c")
}

/// Whether this CPU has the instructions of [`super::Isa::Avx512`].
pub fn has_avx512() -> bool {
    has_avx2()
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512vnni")
}
