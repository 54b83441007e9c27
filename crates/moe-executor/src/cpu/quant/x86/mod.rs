//! Kernels with x86 vector instructions.
//!
//! The functions have `#[target_feature]` attributes; [`super::Kernel::for_isa`] selects only those that the CPU supports.

// Loops over lanes index several arrays at once.
#![allow(clippy::needless_range_loop)]

/// Defines the product `$name` of all rows with at most [`MAX_STREAMED`](super::gemm::MAX_STREAMED) tokens, for formats with the
/// trait `$format` and with the target features `$features`.
///
/// The function `dot::<F, R, T>` of the calling module computes the inner products of `R` rows and `T` tokens. It gets
/// `$elements` of each row and `$activations` of each token. More tokens per pass need more registers, which leaves
/// fewer for rows.
macro_rules! define_stream {
    ($name:ident: $format:ident, $features:literal, $activations:ident, $elements:path) => {
        /// The products of all rows and tokens.
        #[target_feature(enable = $features)]
        pub fn $name<F: $format>(
            product: &crate::cpu::quant::gemm::Product,
            put: &mut crate::cpu::quant::gemm::Put,
        ) {
            use crate::cpu::quant::gemm::{MAX_STREAMED, Product, Put};

            /// The products of all rows and `T` tokens, `R` rows at a time.
            #[target_feature(enable = $features)]
            fn tokens<F: $format, const R: usize, const T: usize>(
                product: &Product,
                first: usize,
                put: &mut Put,
            ) {
                let act: [_; T] = std::array::from_fn(|t| $activations::<F>(product, first + t));
                product.stream(first, put, |rows| dot::<F, R, T>(rows.map($elements), &act));
            }

            for first in (0..product.n_tokens).step_by(MAX_STREAMED) {
                match product.n_tokens - first {
                    1 => tokens::<F, 4, 1>(product, first, put),
                    2 => tokens::<F, 2, 2>(product, first, put),
                    3 => tokens::<F, 1, 3>(product, first, put),
                    _ => tokens::<F, 1, MAX_STREAMED>(product, first, put),
                }
            }
        }
    };
}

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
