//! Inner products on the block formats of GGUF files, as ggml does them.
//!
//! Weights stay as they are in the file. Activations are converted once for each product to the type that ggml
//! multiplies the weights' type with ([`ActivationType`]); products within a group of elements that share a scale are
//! exact, in integers. [`Kernel`] picks the code for a type and for this processor.
//!
//! A format is a struct with the layout of its block and one method that decodes it (`format::Format`). Decoding rows
//! and products for any machine follow from that; where it pays, a format has vector code of its own in `x86`.

/// `Some` of an expression in which `$format` is the `format::Format` of a type with blocks, `None` for other types.
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
use float::{Bf16, FloatFormat};
use format::{F16, Format};
pub use gemm::{Product, Put, Scratch};

/// Errors of the kernels.
#[derive(Debug, thiserror::Error, PartialEq)]
#[non_exhaustive]
pub enum Error {
    /// There is no kernel for the type.
    #[error("no kernel for type {ty}; there are kernels for {}", supported())]
    Unsupported {
        /// The type asked for.
        ty: GgmlType,
    },
    /// A row is no whole number of blocks.
    #[error("a row of {n} elements is not a whole number of {ty} blocks of {}", ty.block_size())]
    PartialBlock {
        /// Type of the row.
        ty: GgmlType,
        /// Its elements.
        n: usize,
    },
    /// A row has another length than its elements need.
    #[error("a row of {n} {ty} elements takes {expected} bytes, not {found}")]
    RowSize {
        /// Type of the row.
        ty: GgmlType,
        /// Its elements.
        n: usize,
        /// Bytes that they take.
        expected: u64,
        /// Bytes given.
        found: usize,
    },
}

/// Rows, bytes of a row, elements of a row, activations, results. The functions trust the caller on the lengths no
/// further than memory safety allows; those for x86 need the processor features of their [`Isa`].
type Gemv = unsafe fn(&[u8], usize, usize, &[u8], &mut [f32]);

/// A product with many rows of activations. The same holds as for [`Gemv`].
type Gemm = unsafe fn(&Product, &mut Scratch, &mut Put);

/// With fewer rows of activations, decoding the weights once does not pay.
const MIN_TOKENS: usize = 4;

/// The instructions that a kernel uses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Isa {
    /// Those that every processor of the target has.
    Portable,
    /// x86 with AVX2, FMA and F16C.
    Avx2,
    /// x86 with AVX-512 F, BW, DQ, VL and VNNI.
    Avx512,
}

impl Isa {
    /// The instruction sets that this processor has, the widest last.
    pub fn available() -> Vec<Isa> {
        let all = [Isa::Portable, Isa::Avx2, Isa::Avx512];
        all.into_iter().filter(|isa| isa.is_available()).collect()
    }

    /// The widest instruction set of this processor.
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

/// Products of rows of one type with activations.
#[derive(Clone, Copy)]
pub struct Kernel {
    activation: ActivationType,
    ty: GgmlType,
    gemv: Gemv,
    gemm: Option<Gemm>,
    dequantize: fn(&[u8], &mut [f32]),
}

impl Kernel {
    /// The fastest kernel for a type on this processor.
    ///
    /// # Errors
    /// [`Error::Unsupported`], which lists the types that have one.
    pub fn for_type(ty: GgmlType) -> Result<Kernel, Error> {
        Kernel::for_isa(ty, Isa::best()).ok_or(Error::Unsupported { ty })
    }

    /// The kernel for a type that uses one of the [`Isa::available`] instruction sets.
    ///
    /// # Panics
    /// If this processor does not have it.
    pub fn for_isa(ty: GgmlType, isa: Isa) -> Option<Kernel> {
        assert!(isa.is_available(), "this processor has no {isa:?}");
        let kernel = match ty {
            GgmlType::F32 => Some(Kernel::float::<F32>(ty)),
            GgmlType::F16 => Some(Kernel::float::<F16>(ty)),
            GgmlType::BF16 => Some(Kernel::float::<Bf16>(ty)),
            _ => with_format!(ty, F => Kernel::quantized::<F>(ty)),
        }?;
        #[cfg(target_arch = "x86_64")]
        if let Some(gemv) = x86::gemv(ty, isa) {
            return Some(Kernel {
                gemv,
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
            gemv: portable::gemv::<F>,
            gemm: None,
            dequantize: portable::dequantize::<F>,
        }
    }

    fn float<F: FloatFormat>(ty: GgmlType) -> Kernel {
        Kernel {
            activation: F::ACTIVATION,
            ty,
            gemv: portable::gemv_float::<F>,
            gemm: None,
            dequantize: portable::dequantize_float::<F>,
        }
    }

    /// The type that activations have to be converted to.
    pub fn activation(&self) -> ActivationType {
        self.activation
    }

    /// The type of the rows.
    pub fn ty(&self) -> GgmlType {
        self.ty
    }

    /// `out[r] = row r · act`: the products of `out.len()` rows of `n` elements, `row_size` bytes each, with one row of
    /// converted activations.
    ///
    /// # Panics
    /// If the lengths do not fit together.
    pub fn gemv(&self, rows: &[u8], row_size: usize, n: usize, act: &[u8], out: &mut [f32]) {
        let expected = self.ty.row_size(n as u64);
        assert_eq!(
            Some(row_size as u64),
            expected,
            "bytes of a row of {n} {} elements",
            self.ty
        );
        assert_eq!(
            rows.len(),
            row_size * out.len(),
            "bytes of {} rows",
            out.len()
        );
        assert_eq!(
            act.len(),
            self.activation.row_size(n),
            "bytes of {n} activations"
        );
        if n == 0 {
            out.fill(0.0);
            return;
        }
        // SAFETY: `for_isa` has asserted that the processor has what the function needs, and the lengths fit.
        unsafe { (self.gemv)(rows, row_size, n, act, out) }
    }

    /// A product with many rows of activations. Results are handed to `put(t, r, products)`: those of token `t` with
    /// row `r` and the rows after it, each once, in no promised order.
    ///
    /// # Panics
    /// If the lengths do not fit together.
    pub fn gemm(&self, product: &Product, scratch: &mut Scratch, put: &mut Put) {
        let Product {
            rows,
            row_size,
            n,
            n_tokens,
            act,
        } = *product;
        let n_rows = product.n_rows();
        self.check_rows(rows, row_size, n, n_rows);
        match self.gemm {
            Some(gemm) if n_tokens >= MIN_TOKENS && n > 0 && n_rows > 0 => {
                // SAFETY: as in `gemv`; the function checks the activations' length as it reads them.
                unsafe { gemm(product, scratch, put) }
            }
            _ => {
                let mut out = [0.0; 64];
                for first in (0..n_rows).step_by(out.len()) {
                    let out = &mut out[..64.min(n_rows - first)];
                    let rows = &rows[first * row_size..][..out.len() * row_size];
                    for token in 0..n_tokens {
                        self.gemv(rows, row_size, n, act(token), out);
                        put(token, first, out);
                    }
                }
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
/// If the type has no kernel, or the lengths do not fit together.
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

/// The names of the types that have a kernel.
fn supported() -> String {
    let has_kernel = |ty: &&GgmlType| Kernel::for_isa(**ty, Isa::Portable).is_some();
    let names: Vec<_> = GgmlType::ALL
        .iter()
        .filter(has_kernel)
        .map(|ty| ty.name())
        .collect();
    names.join(", ")
}
