//! Rotary position embedding, stores to the KV cache, and attention.

use crate::activation::Activation;
use crate::cpu::attention::Shape;
use crate::cuda::launch::{Attention, Rope as Rotation};
use crate::cuda::{Device, Result, Scratch};
use crate::hparams::Rope;
use crate::kv_cache;
use crate::mirrored::Mirrored;
use crate::weights::Vector;

impl Device {
    /// Applies the rotary embedding to every head of every row of `x`, in place. `angles`: `(rows, n_dims)`.
    pub(crate) fn rope(
        &mut self,
        rope: &Rope,
        angles: &mut Mirrored<f32>,
        head_dim: usize,
        x: &mut Activation,
    ) -> Result<()> {
        let angles = angles.device(self.gpu())?;
        let rotation = Rotation {
            x: x.values.update_device(self.gpu())?,
            angles,
            rows: x.rows,
            row_width: x.width,
            head_dim,
            n_dims: rope.n_dims,
            layout: rope.layout,
        };
        self.kernels().rope(self.stream(), &rotation)
    }

    /// Stores `rows` at their positions in the K or V cache of a layer, which has `width` elements per position.
    pub(crate) fn store_rows(
        &mut self,
        rows: &mut Activation,
        positions: &[u32],
        width: usize,
        cache: &mut Mirrored<f32>,
    ) -> Result<()> {
        let x = rows.values.device(self.gpu())?;
        let at = self.positions(positions)?;
        let out = cache.update_device(self.gpu())?;
        let kernels = self.kernels();
        kernels.store_rows(self.stream(), x, at, rows.rows, width, out)
    }

    /// Attention of the rows of `q` at `positions` over the KV cache of a layer.
    pub(crate) fn attention(
        &mut self,
        shape: &Shape,
        sinks: Option<&Vector>,
        positions: &[u32],
        q: &mut Activation,
        layer: &mut kv_cache::KvLayer,
        dst: &mut Activation,
    ) -> Result<()> {
        let last_position = positions.last().map_or(0, |&p| p as usize);
        let kernels = self.kernels();
        let bytes = kernels.attention_scratch_size(shape, q.rows, last_position)?;
        let heads = Attention {
            shape,
            q: q.values.device(self.gpu())?,
            k: layer.k.device(self.gpu())?,
            v: layer.v.device(self.gpu())?,
            sinks: self.optional(sinks)?,
            positions: self.positions(positions)?,
            n_tokens: q.rows,
            last_position,
            out: dst.values.fill_device(self.gpu())?,
            scratch: self.scratch(Scratch::Attention, bytes)?,
        };
        self.kernels().attention(self.stream(), &heads)
    }
}
