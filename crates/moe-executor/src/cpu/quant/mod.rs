//! Inner products on the quantization formats of GGUF files, with the arithmetic of ggml.
//!
//! Weights are not converted. Activations are converted once per product to the type that ggml multiplies with the type of
//! the weights ([`ActivationType`]). Products within a group of elements with a common scale are exact, in integers.
//! [`Kernel`] selects the code for a type and for this CPU.
//!
//! A format is a struct with the memory layout of its block and methods that decode it (`format::Format`); the layouts are
//! those of ggml's `ggml-common.h`. Portable code for rows and products is derived from these methods. `x86` has vector code
//! for each format.

/// `Some` of an expression in which `$format` is the `format::Format` of a block type, `None` for other types.
macro_rules! with_format {
    ($ty:expr, $format:ident => $body:expr) => {
        with_format!(@match $ty, $format => $body;
            Q4_0: legacy::Q4_0, Q4_1: legacy::Q4_1, Q5_0: legacy::Q5_0, Q5_1: legacy::Q5_1, Q8_0: legacy::Q8_0,
            Q2_K: k_quants::Q2K, Q3_K: k_quants::Q3K, Q4_K: k_quants::Q4K, Q5_K: k_quants::Q5K, Q6_K: k_quants::Q6K,
            IQ1_S: iq1::Iq1S, IQ1_M: iq1::Iq1M,
            IQ2_XXS: iq2::Iq2Xxs, IQ2_XS: iq2::Iq2Xs, IQ2_S: iq2::Iq2S,
            IQ3_XXS: iq3::Iq3Xxs, IQ3_S: iq3::Iq3S, IQ4_NL: iq4::Iq4Nl, IQ4_XS: iq4::Iq4Xs,
            MXFP4: fp4::Mxfp4, NVFP4: fp4::Nvfp4, TQ1_0: ternary::Tq1_0, TQ2_0: ternary::Tq2_0,
        )
    };
    (@match $ty:expr, $format:ident => $body:expr; $($name:ident: $module:ident::$block:ident,)*) => {
        match $ty {
            $(moe_gguf::GgmlType::$name => {
                type $format = $crate::cpu::quant::$module::$block;
                Some($body)
            })*
            _ => None,
        }
    };
}

mod activation;
mod float;
mod format;
mod fp4;
mod gemm;
mod iq1;
mod iq2;
mod iq3;
mod iq4;
mod iq_grids;
mod k_quants;
mod legacy;
mod portable;
mod ternary;
#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::sync::OnceLock;

use moe_gguf::GgmlType;
use zerocopy::byteorder::little_endian::F32;

pub use activation::ActivationType;
pub(crate) use activation::quantize_q8_0_block;
use float::{Bf16, FloatFormat};
pub(crate) use format::f16_to_f32;
use format::{F16, Format};
pub(crate) use gemm::MAX_STREAMED;
pub use gemm::{Product, Put, Scratch};

/// Errors of the kernels.
#[derive(Debug, thiserror::Error, PartialEq)]
#[non_exhaustive]
pub enum Error {
    /// The type has no kernel.
    #[error("type {ty} is not supported; the supported types are {}", supported())]
    Unsupported {
        /// The type.
        ty: GgmlType,
    },
    /// The number of elements of a row is not a multiple of the block size.
    #[error("a row of {n} {ty} elements is not a multiple of the block size, {}", ty.block_size())]
    PartialBlock {
        /// Type of the row.
        ty: GgmlType,
        /// Elements of the row.
        n: usize,
    },
    /// The size of a row does not match its number of elements.
    #[error("a row of {n} {ty} elements has {expected} bytes, but {found} bytes were passed")]
    RowSize {
        /// Type of the row.
        ty: GgmlType,
        /// Elements of the row.
        n: usize,
        /// Bytes of `n` elements.
        expected: u64,
        /// Bytes passed.
        found: usize,
    },
}

/// Product that streams the rows of weights.
///
/// Callers guarantee that the lengths match, as [`Kernel::gemm`] asserts, that rows are not empty, and that the CPU has the
/// instructions of the function's [`Isa`].
type Stream = unsafe fn(&Product, &mut Put);

/// Product that decodes the weights into panels. The safety conditions are those of [`Stream`].
type Gemm = unsafe fn(&Product, &mut Scratch, &mut Put);

/// The instruction set of a kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Isa {
    /// Baseline instructions of the target.
    Portable,
    /// x86 with AVX2, FMA and F16C.
    Avx2,
    /// x86 with AVX-512 F, BW, DQ, VL and VNNI.
    Avx512,
}

impl Isa {
    /// The instruction sets of this CPU, the widest last.
    pub fn available() -> Vec<Isa> {
        let all = [Isa::Portable, Isa::Avx2, Isa::Avx512];
        all.into_iter().filter(|isa| isa.is_available()).collect()
    }

    /// The widest instruction set of this CPU.
    pub fn best() -> Isa {
        static BEST: OnceLock<Isa> = OnceLock::new();
        *BEST.get_or_init(|| Isa::available().pop().unwrap_or(Isa::Portable))
    }

    fn is_available(self) -> bool {
        match self {
            Isa::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => x86::has_avx2(),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => x86::has_avx512(),
            #[cfg(not(target_arch = "x86_64"))]
            Isa::Avx2 | Isa::Avx512 => false,
        }
    }
}

/// The kernel of a tensor type: products with activations, and decoding.
#[derive(Clone, Copy)]
pub struct Kernel {
    activation: ActivationType,
    ty: GgmlType,
    stream: Stream,
    gemm: Option<Gemm>,
    dequantize: fn(&[u8], &mut [f32]),
}

impl Kernel {
    /// The fastest kernel for a type on this CPU.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the type has no kernel.
    pub fn for_type(ty: GgmlType) -> Result<Kernel, Error> {
        Kernel::for_isa(ty, Isa::best()).ok_or(Error::Unsupported { ty })
    }

    /// The kernel for a type with an instruction set of [`Isa::available`]; `None` if the type has no kernel.
    ///
    /// # Panics
    /// If this CPU does not have the instruction set.
    pub fn for_isa(ty: GgmlType, isa: Isa) -> Option<Kernel> {
        assert!(isa.is_available(), "this CPU does not have {isa:?}");
        let kernel = match ty {
            GgmlType::F32 => Some(Kernel::float::<F32>(ty)),
            GgmlType::F16 => Some(Kernel::float::<F16>(ty)),
            GgmlType::BF16 => Some(Kernel::float::<Bf16>(ty)),
            _ => with_format!(ty, F => Kernel::quantized::<F>(ty)),
        }?;
        #[cfg(target_arch = "x86_64")]
        if let Some(stream) = x86::stream(ty, isa) {
            return Some(Kernel {
                stream,
                gemm: x86::gemm(ty, isa),
                ..kernel
            });
        }
        Some(kernel)
    }

    fn quantized<F: Format>(ty: GgmlType) -> Kernel {
        Kernel {
            activation: F::ACTIVATION,
            ty,
            stream: portable::stream::<F>,
            gemm: None,
            dequantize: portable::dequantize::<F>,
        }
    }

    fn float<F: FloatFormat>(ty: GgmlType) -> Kernel {
        Kernel {
            activation: F::ACTIVATION,
            ty,
            stream: portable::stream_float::<F>,
            gemm: None,
            dequantize: portable::dequantize_float::<F>,
        }
    }

    /// The type that activations must be converted to.
    pub fn activation(&self) -> ActivationType {
        self.activation
    }

    /// The type of the weights.
    pub fn ty(&self) -> GgmlType {
        self.ty
    }

    /// `out[r] = row r · act`: the products of `out.len()` rows of `n` elements and `row_size` bytes with one row of converted
    /// activations.
    ///
    /// # Panics
    /// If the lengths do not match.
    pub fn gemv(&self, rows: &[u8], row_size: usize, n: usize, act: &[u8], out: &mut [f32]) {
        let n_rows = out.len();
        self.check_rows(rows, row_size, n, n_rows);
        assert_eq!(
            act.len(),
            self.activation.row_size(n),
            "bytes of {n} activations"
        );
        if n == 0 {
            out.fill(0.0);
            return;
        }
        let product = Product {
            rows,
            row_size,
            n,
            n_tokens: 1,
            act: &|_| act,
        };
        let mut put = |_: usize, first: usize, products: &[f32]| {
            out[first..][..products.len()].copy_from_slice(products);
        };
        // SAFETY: `for_isa` has asserted that the CPU has the instructions, and the lengths match by the assertions above.
        unsafe { (self.stream)(&product, &mut put) }
    }

    /// The product with several rows of activations. `put(t, r, products)` receives the products of token `t` with row `r`
    /// and the rows after it, in an unspecified order, and some of them twice.
    ///
    /// # Panics
    /// If the lengths do not match.
    pub fn gemm(&self, product: &Product, scratch: &mut Scratch, put: &mut Put) {
        let n_rows = product.n_rows();
        self.check_rows(product.rows, product.row_size, product.n, n_rows);
        if n_rows == 0 {
            return;
        }
        // SAFETY: like in `gemv`; rows have bytes because there are rows, and `Q8Row::new` and `floats` check the length of the
        // activations.
        unsafe {
            match self.gemm {
                Some(gemm) if product.n_tokens > MAX_STREAMED => gemm(product, scratch, put),
                _ => (self.stream)(product, put),
            }
        }
    }

    fn check_rows(&self, rows: &[u8], row_size: usize, n: usize, n_rows: usize) {
        let expected = self.ty.row_size(n as u64);
        assert_eq!(
            Some(row_size as u64),
            expected,
            "bytes of a row of {n} {} elements",
            self.ty
        );
        assert_eq!(rows.len(), row_size * n_rows, "bytes of {n_rows} rows");
    }
}

/// Decodes a row of `out.len()` elements.
///
/// # Errors
/// The type has no kernel, or the lengths do not match.
pub fn dequantize_row(ty: GgmlType, row: &[u8], out: &mut [f32]) -> Result<(), Error> {
    let n = out.len();
    let kernel = Kernel::for_isa(ty, Isa::Portable).ok_or(Error::Unsupported { ty })?;
    let expected = ty.row_size(n as u64).ok_or(Error::PartialBlock { ty, n })?;
    if row.len() as u64 != expected {
        return Err(Error::RowSize {
            ty,
            n,
            expected,
            found: row.len(),
        });
    }
    (kernel.dequantize)(row, out);
    Ok(())
}

/// The names of the types with a kernel.
fn supported() -> String {
    let has_kernel = |ty: &&GgmlType| Kernel::for_isa(**ty, Isa::Portable).is_some();
    let names: Vec<_> = GgmlType::ALL
        .iter()
        .filter(has_kernel)
        .map(|ty| ty.name())
        .collect();
    names.join(", ")
}
