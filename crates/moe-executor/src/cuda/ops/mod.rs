//! The operations of [`crate::ops`] on a GPU: a method of [`Device`] each. It copies operands that are not on the GPU yet, and
//! launches the kernels.
//!
//! # Errors
//! Every method fails if memory cannot be allocated, if no kernel supports the type or the shape, or if the driver fails. Then
//! the CPU runs the operation.

mod attention;
mod elementwise;
mod experts;
mod hot;
mod latent;
mod recurrent;
mod router;

pub(crate) use hot::{Entries, HotCall, HotInput};

use moe_gguf::GgmlType;

use crate::activation::Activation;
use crate::cuda::launch::{Kernels, Rows};
use crate::cuda::{Device, Result};
use crate::weights::{Matrix, Vector};

impl Device {
    /// Whether matrix products support weights of a type.
    pub(crate) fn supports(ty: GgmlType) -> bool {
        Kernels::supports(ty)
    }

    /// Makes the next kernel start after everything that was launched so far.
    pub(crate) fn follow_launches(&mut self) {
        self.kernels().follow_launches();
    }

    /// `dst[i] = weights · src[i] + bias` for every row `i`.
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
