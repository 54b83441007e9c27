//! Rotary position embedding, stores to the KV cache, and attention.

use crate::activation::Activation;
use crate::cpu::attention::Shape;
use crate::cuda::launch::{Attention, Cached, Rope as Rotation, Store};
use crate::cuda::{Device, Ptr, Result, Scratch};
use crate::hparams::Rope;
use crate::kv_cache::{Batch, CacheTensor, KvLayer, Run};
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

    /// Converts `rows` to the type of `cache`, the keys or values of a layer, and stores them at their positions.
    pub(crate) fn store_rows(
        &mut self,
        rows: &mut Activation,
        batch: Batch,
        cache: &mut CacheTensor,
    ) -> Result<()> {
        let x = rows.values.device(self.gpu())?;
        let at = self.positions(batch.positions)?;
        cache.words.reserve_exact(self.gpu())?;
        let out = cache.words.update_device(self.gpu())?;
        let kernels = self.kernels();
        for run in batch.runs {
            let first = run.tokens.start;
            let store = Store {
                x: x.offset(first * rows.width * size_of::<f32>()),
                positions: at.offset(first * size_of::<u32>()),
                rows: run.tokens.len(),
                width: rows.width,
                stride: rows.width * batch.n_seq,
                out: sequence(cache, out, run),
            };
            kernels.store_rows(self.stream(), &store)?;
        }
        Ok(())
    }

    /// Attention of the rows of `q` over the KV cache of a layer.
    pub(crate) fn attention(
        &mut self,
        shape: &Shape,
        sinks: Option<&Vector>,
        batch: Batch,
        q: &mut Activation,
        layer: &mut KvLayer,
        dst: &mut Activation,
    ) -> Result<()> {
        let last_of = |run: &Run| {
            let last = batch.positions[run.tokens.clone()].last();
            last.map_or(0, |&p| p as usize)
        };
        let kernels = self.kernels();
        let mut bytes = 0;
        for run in batch.runs {
            let size = kernels.attention_scratch_size(shape, run.tokens.len(), last_of(run))?;
            bytes = size.max(bytes);
        }
        let row = q.width * size_of::<f32>();
        let q = q.values.device(self.gpu())?;
        let k = layer.k.words.device(self.gpu())?;
        let v = layer.v.words.device(self.gpu())?;
        let sinks = self.optional(sinks)?;
        let at = self.positions(batch.positions)?;
        let out = dst.values.fill_device(self.gpu())?;
        let scratch = self.scratch(Scratch::Attention, bytes)?;
        for run in batch.runs {
            let first = run.tokens.start;
            let heads = Attention {
                shape,
                q: q.offset(first * row),
                k: sequence(&layer.k, k, run),
                v: sequence(&layer.v, v, run),
                stride: shape.n_head_kv * shape.head_dim * batch.n_seq,
                sinks,
                positions: at.offset(first * size_of::<u32>()),
                n_tokens: run.tokens.len(),
                last_position: last_of(run),
                out: out.offset(first * row),
                scratch,
            };
            self.kernels().attention(self.stream(), &heads)?;
        }
        Ok(())
    }
}

/// The keys or values of the sequence of a run; `at` is the address of all sequences.
fn sequence(cache: &CacheTensor, at: Ptr, run: &Run) -> Cached {
    Cached {
        at: at.offset(run.sequence * cache.row_size()),
        ty: cache.ty(),
    }
}
