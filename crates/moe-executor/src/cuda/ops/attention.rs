//! Rotary position embedding, stores to the KV cache, and attention.

use std::ops::Range;

use crate::activation::Activation;
use crate::cpu::attention::Shape;
use crate::cuda::launch::{Attention, Cached, Rope as Rotation, Store};
use crate::cuda::{Device, Ptr, Result, Scratch};
use crate::hparams::Rope;
use crate::kv_cache::{Batch, CacheTensor, KvLayer, Run};
use crate::mirrored::Mirrored;
use crate::weights::Vector;

impl Device {
    /// Applies the rotary embedding to the first elements of every head of every row of `x`, in place. `angles`: `(rows, n_dims)`.
    pub(crate) fn rope(
        &mut self,
        rope: &Rope,
        angles: &mut Mirrored<f32>,
        head_dim: usize,
        x: &mut Activation,
    ) -> Result<()> {
        self.rope_from(0, rope, angles, head_dim, x)
    }

    /// Applies it to the elements of every head from `first` on.
    pub(super) fn rope_from(
        &mut self,
        first: usize,
        rope: &Rope,
        angles: &mut Mirrored<f32>,
        head_dim: usize,
        x: &mut Activation,
    ) -> Result<()> {
        let angles = angles.device(self.gpu())?;
        let at = x.values.update_device(self.gpu())?;
        let rotation = Rotation {
            x: at.offset(first * size_of::<f32>()),
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
        let places = self.places(batch)?;
        cache.words.reserve_exact(self.gpu())?;
        let out = cache.words.update_device(self.gpu())?;
        let store = Store {
            x,
            at: places.rows,
            rows: rows.rows,
            width: rows.width,
            out: sequence(cache, out, 0),
        };
        self.kernels().store_rows(self.stream(), &store)
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
        let calls: Vec<Call> = Call::of(batch).collect();
        let kernels = self.kernels();
        let types = [&layer.k, layer.values()].map(CacheTensor::ty);
        let mut bytes = 0;
        for call in &calls {
            let (n, last) = (call.tokens.len(), call.last_position);
            let size = kernels.attention_scratch_size(shape, types, n, last)?;
            bytes = size.max(bytes);
        }
        let [row, out_row] = [q.width, dst.width].map(|width| width * size_of::<f32>());
        let q = q.values.device(self.gpu())?;
        let k = layer.k.words.device(self.gpu())?;
        let v = if layer.has_values_in_keys() {
            k
        } else {
            layer.v.words.device(self.gpu())?
        };
        let values = layer.values();
        let strides = [&layer.k, values].map(|rows| rows.width() * batch.n_seq);
        let sinks = self.optional(sinks)?;
        let places = self.places(batch)?;
        let out = dst.values.fill_device(self.gpu())?;
        let scratch = self.scratch(Scratch::Attention, bytes)?;
        for call in &calls {
            let first = call.tokens.start;
            let at = |places: Ptr| places.offset(first * size_of::<u32>());
            let heads = Attention {
                shape,
                q: q.offset(first * row),
                k: sequence(&layer.k, k, call.sequence.unwrap_or(0)),
                v: sequence(values, v, call.sequence.unwrap_or(0)),
                strides,
                sinks,
                positions: at(places.positions),
                sequences: match call.sequence {
                    Some(_) => Ptr::NULL,
                    None => at(places.sequences),
                },
                n_tokens: call.tokens.len(),
                last_position: call.last_position,
                out: out.offset(first * out_row),
                scratch,
            };
            self.kernels().attention(self.stream(), &heads)?;
        }
        Ok(())
    }
}

/// Tokens of a pass that one call of attention processes.
struct Call {
    tokens: Range<usize>,
    /// The sequence; `None` for single tokens of several sequences.
    sequence: Option<usize>,
    /// Largest position.
    last_position: usize,
}

impl Call {
    /// The calls for a batch: one for each sequence with several tokens, and one for consecutive sequences with a single token.
    fn of(batch: Batch) -> impl Iterator<Item = Call> {
        let is_single = |run: &Run| run.tokens.len() == 1;
        let groups = batch
            .runs
            .chunk_by(move |a, b| is_single(a) && is_single(b));
        groups.filter_map(move |runs| {
            let (first, last) = (runs.first()?, runs.last()?);
            let tokens = first.tokens.start..last.tokens.end;
            let positions = batch.positions[tokens.clone()].iter();
            Some(Call {
                tokens,
                sequence: (runs.len() == 1).then_some(first.sequence),
                last_position: positions.max().map_or(0, |&position| position as usize),
            })
        })
    }
}

/// The keys or values of a sequence; `at` is the address of all sequences.
fn sequence(cache: &CacheTensor, at: Ptr, sequence: usize) -> Cached {
    Cached {
        at: at.offset(sequence * cache.row_size()),
        ty: cache.ty(),
    }
}
