//! Kernels with x86 vector instructions.
//!
//! The functions have `#[target_feature]` attributes; [`super::Kernel::for_isa`] selects only those that the CPU supports.

// Loops over lanes index several arrays at once.
#![allow(clippy::needless_range_loop)]

pub mod avx2;
mod avx512;

use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};

use moe_gguf::GgmlType as T;
use zerocopy::byteorder::little_endian::F32;

use super::float::Bf16;
use super::format::F16;
use super::{Gemm, Gemv, Isa};

/// The matrix-vector product for a type and instruction set; `None` for portable code.
pub fn gemv(ty: T, isa: Isa) -> Option<Gemv> {
    match (isa, ty) {
        (Isa::Portable, _) => None,
        (Isa::Avx2, T::F32) => Some(avx2::gemv_float::<F32>),
        (Isa::Avx2, T::F16) => Some(avx2::gemv_float::<F16>),
        (Isa::Avx2, T::BF16) => Some(avx2::gemv_float::<Bf16>),
        (Isa::Avx2, _) => with_format!(ty, F => avx2::gemv::<F> as Gemv),
        (Isa::Avx512, T::F32) => Some(avx512::gemv_float::<F32>),
        (Isa::Avx512, T::F16) => Some(avx512::gemv_float::<F16>),
        (Isa::Avx512, T::BF16) => Some(avx512::gemv_float::<Bf16>),
        (Isa::Avx512, _) => with_format!(ty, F => avx512::gemv::<F> as Gemv),
    }
}

/// The product with several rows of activations for a type and instruction set; `None` for portable code.
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

/// Prefetches `n` elements or blocks at `at + distance` bytes, which belong to the next tile of rows. A tile of four rows is
/// four short streams, and the hardware prefetcher does not predict the starts of the next streams.
#[inline(always)]
fn prefetch<T>(at: *const T, n: usize, distance: usize) {
    for line in (0..n * size_of::<T>()).step_by(64) {
        let line = at.cast::<i8>().wrapping_add(distance + line);
        // SAFETY: a prefetch does not access memory in the sense of the language, so any address is allowed.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(line) };
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
