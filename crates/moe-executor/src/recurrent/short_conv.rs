//! The short convolution of LFM2: a causal convolution of a product, whose output is multiplied by a gate.

use moe_gguf::LayerId;

use crate::activation::{Activation, NodeName};
use crate::buffers::Inventory;
use crate::error::Result;
use crate::hparams::{HParams, StateShape};
use crate::kv_cache::KvCache;
use crate::norm::Norm;
use crate::ops::{At, Convolution, Ops};
use crate::weights::{Loader, Matrix, Vector};

/// Weights of a layer.
pub struct ShortConv<'g> {
    il: LayerId,
    /// `(n_embd)`
    norm: Norm,
    /// Products of input gate, output gate and values `(n_embd, 3 n_embd)`.
    input: Matrix<'g>,
    /// Kernel of each channel `(n, n_embd)`, for the oldest input first.
    kernel: Vector,
    /// `(n_embd, n_embd)`
    output: Matrix<'g>,
}

/// Buffers of the layers.
pub struct ShortConvState {
    /// Normed input `(token, n_embd)`.
    normed: Activation,
    /// Input gates, output gates and values `(token, 3 n_embd)`.
    projected: Activation,
    /// Gated values, the input of the convolution `(token, n_embd)`.
    gated: Activation,
    /// Output of the convolution `(token, n_embd)`.
    convolved: Activation,
}

/// Names of the buffers of a pass over `tokens` tokens, and their number of values.
pub(super) fn buffers(n_embd: usize, tokens: u64) -> Vec<(&'static str, u64)> {
    let values = tokens * n_embd as u64;
    vec![
        ("short convolution input", values),
        ("short convolution gates and values", 3 * values),
        ("gated values", values),
        ("short convolution", values),
    ]
}

impl ShortConvState {
    /// Buffers whose ids start at `first_id`.
    pub fn new(first_id: u64) -> ShortConvState {
        let buffer = |i| Activation::new(first_id + i);
        ShortConvState {
            normed: buffer(0),
            projected: buffer(1),
            gated: buffer(2),
            convolved: buffer(3),
        }
    }

    /// Adds its buffers to an inventory.
    pub(crate) fn buffers(&self, inventory: &mut Inventory) {
        inventory.activation("short convolution input", &self.normed);
        inventory.activation("short convolution gates and values", &self.projected);
        inventory.activation("gated values", &self.gated);
        inventory.activation("short convolution", &self.convolved);
    }
}

impl<'g> ShortConv<'g> {
    pub(crate) fn load(
        loader: &Loader<'g>,
        hp: &HParams,
        il: LayerId,
        shape: StateShape,
    ) -> Result<ShortConv<'g>> {
        let n_embd = hp.n_embd;
        let name = |part: &str| format!("blk.{il}.{part}");
        let matrix = |part: &str, n_out| {
            let name = name(&format!("shortconv.{part}.weight"));
            loader.matrix(&name, n_embd, n_out)
        };
        let kernel = name("shortconv.conv.weight");
        Ok(ShortConv {
            il,
            norm: Norm::load(loader, hp, &name("attn_norm"), n_embd, hp.norm_bias)?,
            input: matrix("in_proj", 3 * n_embd)?,
            kernel: loader.kernels(&kernel, shape.n_past + 1, shape.channels)?,
            output: matrix("out_proj", n_embd)?,
        })
    }

    /// Operations of the layer. Each writes one record per pass.
    pub(crate) fn ops(&self) -> usize {
        let (products, gates, convolution) = (2, 2, 1);
        self.norm.ops() + products + gates + convolution
    }

    /// Computes the convolution for each row of `x (token, n_embd)`. Updates the states in the cache.
    pub fn convolve(
        &self,
        ops: &mut Ops,
        at: At,
        s: &mut ShortConvState,
        x: &mut Activation,
        cache: &mut KvCache,
    ) {
        let name = |stem| NodeName::of(stem, self.il);
        let n = self.kernel.n;
        let norm = ["norm", "model.layers.{}.operator_norm"].map(name);
        ops.norm(at.device, norm, x, &self.norm, &mut s.normed);
        let product = name("model.layers.{}.conv.in_proj");
        ops.mul_mat(product, &self.input, &mut s.normed, &mut s.projected);
        let columns = [0..n, 2 * n..3 * n];
        ops.multiply_columns(name("conv_input"), columns, &mut s.projected, &mut s.gated);
        let convolution = Convolution {
            name: name("model.layers.{}.conv.conv"),
            kernel: &self.kernel,
            bias: None,
            silu: None,
        };
        let (gated, out) = (&mut s.gated, &mut s.convolved);
        ops.convolve(self.il, &convolution, gated, cache, out);
    }

    /// `out = output product of the gated convolution`, after [`ShortConv::convolve`]; `out (token, n_embd)`.
    pub fn output(&self, ops: &mut Ops, s: &mut ShortConvState, out: &mut Activation) {
        let name = |stem| NodeName::of(stem, self.il);
        let n = self.kernel.n;
        let (gates, convolved) = (&mut s.projected, &mut s.convolved);
        ops.multiply_by_columns(name("conv_gated"), n..2 * n, gates, convolved);
        let product = name("model.layers.{}.conv.out_proj");
        ops.mul_mat(product, &self.output, convolved, out);
        out.name = product.reshaped(); // llama.cpp reshapes the output of all sequences
    }
}
