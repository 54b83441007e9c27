//! Recurrent layers, whose states are on the GPU of the layer.

use std::ops::Range;

use crate::activation::Activation;
use crate::cpu::delta_net::Heads;
use crate::cpu::state_space::SsmHeads;
use crate::cuda::launch::{self, Columns, check_state};
use crate::cuda::{Device, Ptr, Result};
use crate::kv_cache::{LayerState, Run};
use crate::ops::Convolution;
use crate::weights::Vector;

impl Device {
    /// Convolves each channel of `x (token, channels)` over the tokens of its sequence, and updates the states of the layer.
    pub(crate) fn convolve(
        &mut self,
        it: &Convolution,
        x: &mut Activation,
        (runs, state): (&[Run], &mut LayerState),
        dst: &mut Activation,
    ) -> Result<()> {
        let kernel = self.vector(it.kernel)?;
        let bias = self.optional(it.bias.map(|(bias, _)| bias))?;
        let input = x.values.device(self.gpu())?;
        let runs = self.runs(runs)?;
        state.convolution.reserve_exact(self.gpu())?;
        let states = state.convolution.update_device(self.gpu())?;
        let out = dst.values.fill_device(self.gpu())?;
        for runs in runs {
            let call = launch::Convolution {
                x: input,
                kernel,
                bias,
                channels: x.width,
                n: state.shape().n_past + 1,
                silu: it.silu.is_some(),
                runs,
                states,
                state_stride: state.shape().convolution(),
                out: Columns {
                    at: out,
                    row: x.width,
                },
            };
            self.kernels().convolution(self.stream(), &call)?;
        }
        Ok(())
    }

    /// Convolves queries, keys and values `(token, width)` over the tokens of each sequence with kernels and states of their own, and
    /// multiplies the results `(token, 3 width)` by their sigmoids. Updates the states of the layer.
    pub(crate) fn convolve_qkv(
        &mut self,
        kernels: &[Vector; 3],
        qkv: [&mut Activation; 3],
        (runs, state): (&[Run], &mut LayerState),
        dst: &mut Activation,
    ) -> Result<()> {
        let channels = qkv[0].width;
        let mut parts = [(Ptr::NULL, Ptr::NULL); 3];
        for (part, (kernel, x)) in parts.iter_mut().zip(kernels.iter().zip(qkv)) {
            *part = (self.vector(kernel)?, x.values.device(self.gpu())?);
        }
        let runs = self.runs(runs)?;
        let shape = state.shape();
        state.convolution.reserve_exact(self.gpu())?;
        let states = state.convolution.update_device(self.gpu())?;
        let out = dst.values.fill_device(self.gpu())?;
        for runs in runs {
            for (i, (kernel, x)) in parts.into_iter().enumerate() {
                let first = i * channels * size_of::<f32>();
                let call = launch::Convolution {
                    x,
                    kernel,
                    bias: Ptr::NULL,
                    channels,
                    n: shape.n_past + 1,
                    silu: true,
                    runs,
                    states: states.offset(first * shape.n_past),
                    state_stride: shape.convolution(),
                    out: Columns {
                        at: out.offset(first),
                        row: dst.width,
                    },
                };
                self.kernels().convolution(self.stream(), &call)?;
            }
        }
        Ok(())
    }

    /// The gated delta rule for the tokens of each sequence. Queries and keys of `qkv` are not normalized yet. Updates the states of the
    /// layer.
    pub(crate) fn delta_net(
        &mut self,
        (heads, eps): (Heads, f32),
        [qkv, decay, beta]: [&mut Activation; 3],
        (runs, state): (&[Run], &mut LayerState),
        dst: &mut Activation,
    ) -> Result<()> {
        check_state("delta_net", heads.width, heads.width)?;
        let by_element = decay.width != heads.n_v;
        let gpu = self.gpu();
        let (decay, beta) = (decay.values.device(gpu)?, beta.values.device(gpu)?);
        let qkv = qkv.values.device(gpu)?;
        let runs = self.runs(runs)?;
        state.state.reserve_exact(self.gpu())?;
        let states = state.state.update_device(self.gpu())?;
        let out = dst.values.fill_device(self.gpu())?;
        for runs in runs {
            let call = launch::DeltaNet {
                qkv,
                decay,
                by_element,
                beta,
                heads,
                eps,
                runs,
                states,
                out,
            };
            self.kernels().delta_net(self.stream(), &call)?;
        }
        Ok(())
    }

    /// The scan of Mamba-2 over the tokens of each sequence. Updates the states of the layer.
    pub(crate) fn ssm_scan(
        &mut self,
        heads: SsmHeads,
        decay: &Vector,
        [xbc, dt]: [&mut Activation; 2],
        (runs, state): (&[Run], &mut LayerState),
        dst: &mut Activation,
    ) -> Result<()> {
        check_state("ssm_scan", heads.dim, heads.n_state)?;
        let a = self.vector(decay)?;
        let gpu = self.gpu();
        let (xbc, dt) = (xbc.values.device(gpu)?, dt.values.device(gpu)?);
        let runs = self.runs(runs)?;
        state.state.reserve_exact(self.gpu())?;
        let states = state.state.update_device(self.gpu())?;
        let out = dst.values.fill_device(self.gpu())?;
        for runs in runs {
            let call = launch::SsmScan {
                xbc,
                dt,
                a,
                heads,
                runs,
                states,
                out,
            };
            self.kernels().ssm_scan(self.stream(), &call)?;
        }
        Ok(())
    }

    /// `x = softplus(x + bias) · factors`
    pub(crate) fn decay(
        &mut self,
        bias: &Vector,
        factors: &Vector,
        x: &mut Activation,
    ) -> Result<()> {
        let constants = [self.vector(bias)?, self.vector(factors)?];
        let at = x.values.update_device(self.gpu())?;
        let kernels = self.kernels();
        kernels.decay(self.stream(), at, constants, x.rows, x.width)
    }

    /// `y += x · factor` with a factor for each head; `x` is the start of each row of `xbc`. Nothing is written to `skip`.
    pub(crate) fn add_scaled_heads(
        &mut self,
        heads: SsmHeads,
        factors: &Vector,
        [xbc, skip, y]: [&mut Activation; 3],
    ) -> Result<()> {
        let factors = self.vector(factors)?;
        let x = xbc.values.device(self.gpu())?;
        // Records of the product name the buffer on the GPU.
        skip.values.fill_device(self.gpu())?;
        let sum = y.values.update_device(self.gpu())?;
        let kernels = self.kernels();
        kernels.add_scaled_heads(self.stream(), sum, x, factors, heads, y.rows)
    }

    /// `x += bias` for every row.
    pub(crate) fn add_bias(&mut self, bias: &Vector, x: &mut Activation) -> Result<()> {
        let constants = self.vector(bias)?;
        let at = x.values.update_device(self.gpu())?;
        let kernels = self.kernels();
        kernels.add_bias(self.stream(), at, constants, x.rows, x.width)
    }

    /// `dst = src[a] · src[b]` for two ranges of columns that start at `a` and `b`.
    pub(crate) fn multiply_columns(
        &mut self,
        starts: [usize; 2],
        src: &mut Activation,
        dst: &mut Activation,
    ) -> Result<()> {
        let x = src.values.device(self.gpu())?;
        let out = dst.values.fill_device(self.gpu())?;
        let factors = starts.map(|start| Columns {
            at: x.offset(start * size_of::<f32>()),
            row: src.width,
        });
        let kernels = self.kernels();
        kernels.multiply_columns(self.stream(), factors, dst.rows, dst.width, out)
    }

    /// `x *= src[columns]` for the columns from `start` on.
    pub(crate) fn multiply_by_columns(
        &mut self,
        start: usize,
        src: &mut Activation,
        x: &mut Activation,
    ) -> Result<()> {
        let factors = Columns {
            at: src
                .values
                .device(self.gpu())?
                .offset(start * size_of::<f32>()),
            row: src.width,
        };
        let out = x.values.update_device(self.gpu())?;
        let own = Columns {
            at: out,
            row: x.width,
        };
        let kernels = self.kernels();
        kernels.multiply_columns(self.stream(), [own, factors], x.rows, x.width, out)
    }

    /// Copies ranges of the columns of each group of `group` columns of `src`, one range after the other.
    pub(crate) fn copy_groups(
        &mut self,
        group: usize,
        ranges: &[Range<usize>],
        src: &mut Activation,
        dst: &mut Activation,
    ) -> Result<()> {
        let x = Columns {
            at: src.values.device(self.gpu())?,
            row: src.width,
        };
        let out = dst.values.fill_device(self.gpu())?;
        let kernels = self.kernels();
        kernels.copy_groups(self.stream(), x, src.rows, group, ranges, out)
    }
}
