//! Kernels with x86 vector instructions.

// Loops over lanes and parts index several arrays at once.
#![allow(clippy::needless_range_loop)]

mod avx2;
mod avx512;

use moe_gguf::GgmlType as T;
use zerocopy::byteorder::little_endian::F32;

use super::float::Bf16;
use super::format::{F16, Format};
use super::fp4::{Mxfp4, Nvfp4};
use super::k_quants::{Q2K, Q3K, Q4K, Q5K, Q6K};
use super::legacy::{Q4_0, Q4_1, Q5_0, Q5_1, Q8_0};
use super::{Gemm, Gemv, Isa, portable};

/// The product for a type with the vector instructions of `isa`.
pub fn gemv(ty: T, isa: Isa) -> Option<Gemv> {
    match isa {
        Isa::Portable => None,
        Isa::Avx2 => Some(match ty {
            T::F32 => avx2::gemv_float::<F32>,
            T::F16 => avx2::gemv_float::<F16>,
            T::BF16 => avx2::gemv_float::<Bf16>,
            T::Q4_0 => avx2::gemv::<Q4_0>,
            T::Q4_1 => avx2::gemv::<Q4_1>,
            T::Q5_0 => avx2::gemv::<Q5_0>,
            T::Q5_1 => avx2::gemv::<Q5_1>,
            T::Q8_0 => avx2::gemv::<Q8_0>,
            T::Q2_K => avx2::gemv::<Q2K>,
            T::Q3_K => avx2::gemv::<Q3K>,
            T::Q4_K => avx2::gemv::<Q4K>,
            T::Q5_K => avx2::gemv::<Q5K>,
            T::Q6_K => avx2::gemv::<Q6K>,
            T::MXFP4 => avx2::gemv::<Mxfp4>,
            T::NVFP4 => avx2::gemv::<Nvfp4>,
            _ => return with_format!(ty, F => portable_for_avx2::<F> as Gemv),
        }),
        Isa::Avx512 => Some(match ty {
            T::F32 => avx512::gemv_float::<F32>,
            T::F16 => avx512::gemv_float::<F16>,
            T::BF16 => avx512::gemv_float::<Bf16>,
            T::Q4_0 => avx512::gemv::<Q4_0>,
            T::Q4_1 => avx512::gemv::<Q4_1>,
            T::Q5_0 => avx512::gemv::<Q5_0>,
            T::Q5_1 => avx512::gemv::<Q5_1>,
            T::Q8_0 => avx512::gemv::<Q8_0>,
            T::Q2_K => avx512::gemv::<Q2K>,
            T::Q3_K => avx512::gemv::<Q3K>,
            T::Q4_K => avx512::gemv::<Q4K>,
            T::Q5_K => avx512::gemv::<Q5K>,
            T::Q6_K => avx512::gemv::<Q6K>,
            T::MXFP4 => avx512::gemv::<Mxfp4>,
            T::NVFP4 => avx512::gemv::<Nvfp4>,
            _ => return with_format!(ty, F => portable_for_avx512::<F> as Gemv),
        }),
    }
}

/// The product with many rows of activations for a type with the vector instructions of `isa`.
pub fn gemm(ty: T, isa: Isa) -> Option<Gemm> {
    match isa {
        Isa::Portable | Isa::Avx2 => None,
        Isa::Avx512 => match ty {
            T::F32 => Some(avx512::gemm_float::<F32>),
            T::F16 => Some(avx512::gemm_float::<F16>),
            T::BF16 if is_x86_feature_detected!("avx512bf16") => Some(avx512::gemm_bf16),
            T::BF16 => Some(avx512::gemm_float::<Bf16>),
            _ => with_format!(ty, F => avx512::gemm::<F> as Gemm),
        },
    }
}

/// The portable product compiled for 256-bit vectors.
#[target_feature(enable = "avx2,fma,f16c")]
fn portable_for_avx2<F: Format>(
    rows: &[u8],
    row_size: usize,
    n: usize,
    act: &[u8],
    out: &mut [f32],
) {
    portable::gemv::<F>(rows, row_size, n, act, out);
}

/// The portable product compiled for 512-bit vectors.
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn portable_for_avx512<F: Format>(
    rows: &[u8],
    row_size: usize,
    n: usize,
    act: &[u8],
    out: &mut [f32],
) {
    portable::gemv::<F>(rows, row_size, n, act, out);
}

/// Whether [`super::Isa::Avx2`] kernels run on this processor.
pub fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c")
}

/// Whether [`super::Isa::Avx512`] kernels run on this processor.
pub fn has_avx512() -> bool {
    has_avx2()
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512vnni")
}
