//! The GPU's implementation of the operations in [`crate::ops`]: a method of [`Device`] each, which copies what the kernels read to
//! the GPU where it is not there yet, and launches them.
//!
//! # Errors
//! Of every method: no memory, no kernel for the type or the shape, or the driver's. The host then does the operation.

mod attention;
mod elementwise;
mod experts;
mod router;

use moe_gguf::GgmlType;

use crate::activation::Activation;
use crate::cuda::launch::{Kernels, Rows};
use crate::cuda::{Device, Result};
use crate::weights::{Matrix, Vector};

impl Device {
    /// Whether there are products for weights of a type.
    pub(crate) fn supports(ty: GgmlType) -> bool {
        Kernels::supports(ty)
    }

    /// `dst = weights · src + bias` for every row.
    pub(crate) fn mul_mat(
        &mut self,
        weights: &Matrix,
        bias: Option<&Vector>,
        src: &mut Activation,
        dst: &mut Activation,
    ) -> Result<()> {
        let w = self.matrix_or_copy(weights)?;
        let bias = self.optional(bias)?;
        let x = Rows {
            x: src.values.device(self.gpu())?,
            quantized: src.quantized(self.gpu()),
        };
        let scratch = self.quantized(src.rows, w.n_in)?;
        let out = dst.values.fill_device(self.gpu())?;
        let kernels = self.kernels();
        kernels.mul_mat(self.stream(), &w, bias, x, src.rows, out, scratch)
    }
}
