//! RoPE, the store of keys and values into the cache, and attention.

use moe_trace::LayerId;

use crate::activation::{Activation, NodeName};
use crate::buffers::Input;
use crate::cpu::attention::{self, Inputs, Shape};
use crate::cpu::rope;
use crate::device_id::DeviceId;
use crate::hparams::Rope;
use crate::kv_cache::{Batch, CacheTensor, KvCache, Run};
use crate::ops::elementwise::input;
use crate::ops::{At, Ops, Scope, number};
use crate::recorder::Source;
use crate::weights::Vector;

impl Ops<'_> {
    /// Applies RoPE to each head of each row, in place. `factors (n_dims / 2)` divide the frequencies.
    pub fn rope(
        &mut self,
        device: DeviceId,
        name: NodeName,
        rope: &Rope,
        factors: Option<&Vector>,
        head_dim: usize,
        x: &mut Activation,
    ) {
        let mut scope = self.start();
        let before = Source::from(&*x);
        let width = x.width;
        let divisors = factors.map(|f| f.data.as_slice());
        let mut angles = std::mem::take(&mut self.angles);
        let values = angles.of(self.threads, rope, divisors, &self.positions);
        let on_gpu = self.on(&mut scope, device, |gpu| {
            gpu.rope(rope, values, head_dim, x)
        });
        if !on_gpu {
            self.fetch(&mut x.values);
            let angles = values.host();
            self.threads.rows(x.data_mut(), width, |i, row| {
                let angles = &angles[i * rope.n_dims..][..rope.n_dims];
                for head in row.chunks_exact_mut(head_dim) {
                    rope::rotate(rope.layout, &mut head[..rope.n_dims], angles);
                }
            });
        }
        self.angles = angles;
        x.name = name;
        let positions = input(Input::Positions, "inp_pos", &self.positions);
        let sources: &[Source] = match factors {
            Some(factors) => &[before, positions, factors.into()],
            None => &[before, positions],
        };
        self.record(&mut scope, number::ROPE, name, sources);
    }

    /// Converts `k (token, n_head_kv * head_dim)` and `v (token, n_head_kv * value_dim)` to the types of the cache and stores them at
    /// their positions in the cache of a layer. Without `v`, the values are the first elements of the keys. With `transposed`, the names
    /// are those of llama.cpp's nodes for transposed values.
    pub fn store_kv(
        &mut self,
        At { il, device }: At,
        k: &mut Activation,
        v: Option<&mut Activation>,
        transposed: bool,
        cache: &mut KvCache,
    ) {
        let n_seq = cache.n_seq();
        let halves = [
            ("cache_k_l", "attn_inp_k_idxs", Some(k)),
            ("cache_v_l", "attn_inp_v_idxs", v),
        ];
        for (half, (stem, idxs, rows)) in halves.into_iter().enumerate() {
            let Some(rows) = rows else {
                continue;
            };
            let mut scope = self.start();
            let positions = std::mem::take(&mut self.positions);
            let (runs, tensor) = cache.half_mut(il, half);
            let batch = Batch {
                positions: &positions,
                runs,
                n_seq,
            };
            let on_gpu = self.on(&mut scope, device, |gpu| {
                gpu.store_rows(rows, batch, tensor)
            });
            self.positions = positions;
            if !on_gpu {
                self.fetch(&mut rows.values);
                self.fetch(&mut tensor.words);
                for run in runs {
                    for token in run.tokens.clone() {
                        let row = self.positions[token] as usize * n_seq + run.sequence;
                        tensor.store(row, rows.row(token));
                    }
                }
            }
            let name = NodeName::cache(stem, il);
            let (stored, suffixes) = if transposed && half == 1 {
                let suffixes = [" (reshaped) (reshaped)", " (reshaped)"];
                (name.reshaped_view(), suffixes)
            } else {
                (name.view(), [" (view)", ""])
            };
            let sources = [
                Source::view(&*rows, suffixes[0]),
                input(Input::Positions, idxs, &self.positions),
                cached(
                    name,
                    suffixes[1],
                    (il, half),
                    tensor,
                    [tensor.width(), rows.rows],
                ),
            ];
            self.record(&mut scope, number::SET_ROWS, stored, &sources);
        }
    }

    /// Attention of `q (token, n_head * head_dim)` over the cache of the layer `kv_layer`; `dst (token, n_head * value_dim)`.
    /// `sinks (n_head)` are scores without a value. If the layer has no rows of values, the values are the first elements of the keys.
    pub fn attention(
        &mut self,
        at: At,
        shape: &Shape,
        sinks: Option<&Vector>,
        q: &mut Activation,
        cache: (&mut KvCache, LayerId),
        dst: &mut Activation,
    ) {
        let (mut scope, [q, k, v, mask]) = self.attend(at, shape, sinks, q, cache, dst);
        let sources: &[Source] = match sinks {
            Some(sinks) => &[q, k, v, mask, sinks.into()],
            None => &[q, k, v, mask],
        };
        self.record(&mut scope, number::FLASH_ATTN_EXT, dst.name, sources);
    }

    /// Like [`Ops::attention`] without sinks, recorded as llama.cpp's nodes without flash attention. The first of them has the time.
    pub fn attention_in_steps(
        &mut self,
        at: At,
        shape: &Shape,
        q: &mut Activation,
        cache: (&mut KvCache, LayerId),
        dst: &mut Activation,
    ) {
        let (mut scope, [q, k, v, mask]) = self.attend(at, shape, None, q, cache, dst);
        let steps = ["kq", "kq_capped", "kq_tanh", "kq_scaled", "kq_soft_max"];
        let [scores, divided, bounded, scaled, weights] =
            steps.map(|stem| NodeName::of(stem, at.il));
        let values = NodeName::of("kqv", at.il);
        self.record(&mut scope, number::MUL_MAT, scores, &[k, q]);
        self.record(&mut scope, number::SCALE, divided, &[unstored(scores, "")]);
        self.record(&mut scope, number::UNARY, bounded, &[unstored(divided, "")]);
        self.record(&mut scope, number::SCALE, scaled, &[unstored(bounded, "")]);
        let sources = [unstored(scaled, ""), mask];
        self.record(&mut scope, number::SOFT_MAX, weights, &sources);
        self.record(
            &mut scope,
            number::MUL_MAT,
            values,
            &[v, unstored(weights, "")],
        );
        let sources = [unstored(values, " (permuted)")];
        self.record(&mut scope, number::CONT, dst.name, &sources);
    }

    /// Computes the attention. Returns queries, keys, values and mask as sources.
    fn attend(
        &mut self,
        At { il, device }: At,
        shape: &Shape,
        sinks: Option<&Vector>,
        q: &mut Activation,
        (cache, kv_layer): (&mut KvCache, LayerId),
        dst: &mut Activation,
    ) -> (Scope, [Source<'static>; 4]) {
        let mut scope = self.start();
        let name = NodeName::of("kqv_out", il);
        let n_seq = cache.n_seq();
        dst.shape(name, shape.n_head * shape.value_dim, q.rows);
        let (runs, layer) = cache.layer_mut(kv_layer);
        let positions = std::mem::take(&mut self.positions);
        let batch = Batch {
            positions: &positions,
            runs,
            n_seq,
        };
        let on_gpu = self.on(&mut scope, device, |gpu| {
            gpu.attention(shape, sinks, batch, q, layer, dst)
        });
        self.positions = positions;
        if !on_gpu {
            self.fetch(&mut q.values);
            self.fetch(&mut layer.k.words);
            self.fetch(&mut layer.v.words);
            let values = layer.values();
            let out_width = dst.width;
            for run in runs {
                let elements = |width: usize| run.tokens.start * width..run.tokens.end * width;
                let inputs = Inputs {
                    q: &q.data()[elements(q.width)],
                    k: layer.k.rows_from(run.sequence),
                    v: values.rows_from(run.sequence),
                    strides: [&layer.k, values].map(|rows| rows.width() * n_seq),
                    positions: &self.positions[run.tokens.clone()],
                    sinks: sinks.map(|s| s.data.as_slice()),
                };
                let out = &mut dst.data_mut()[elements(out_width)];
                attention::attention(self.threads, shape, &inputs, out);
            }
        }
        // Positions that at least one token of a sequence attends to.
        let seen = |run: &Run| {
            let positions = &self.positions[run.tokens.clone()];
            let ends = positions.first().zip(positions.last());
            ends.map_or(0, |(&first, &last)| {
                shape.visible(last as usize).end - shape.visible(first as usize).start
            })
        };
        let seen = runs.iter().map(seen).sum();
        let view = " (view) (permuted)";
        // The fourth source in ggml is the mask. The executor computes the mask from the positions and reads no memory.
        let mask = unstored(NodeName::global("attn_inp_kq_mask"), "");
        let name = |stem| NodeName::cache(stem, kv_layer);
        let width = layer.k.width();
        let keys = cached(
            name("cache_k_l"),
            view,
            (kv_layer, 0),
            &layer.k,
            [width, seen],
        );
        let values = if layer.has_values_in_keys() {
            let width = shape.n_head_kv * shape.value_dim;
            let view = " (view) (view) (permuted)";
            let name = name("cache_k_l");
            cached(name, view, (kv_layer, 0), &layer.k, [width, seen])
        } else {
            let width = layer.v.width();
            let name = name("cache_v_l");
            cached(name, view, (kv_layer, 1), &layer.v, [width, seen])
        };
        (scope, [Source::view(&*q, view), keys, values, mask])
    }
}

/// Buffer id of the mask and of results of steps, which have no memory.
const UNSTORED_BUFFER: u64 = (1 << 16) - 4;

/// A source of llama.cpp's node that the executor does not store.
pub(super) fn unstored<'a>(name: NodeName, suffix: &'static str) -> Source<'a> {
    Source::Buffer {
        name,
        suffix,
        buffer_id: UNSTORED_BUFFER,
        address: 0,
        size_bytes: 0,
        ne: [0, 0],
        dtype: "f32",
    }
}

/// `rows` rows of a layer's keys (`half` 0) or values (`half` 1) as a source.
fn cached<'a>(
    name: NodeName,
    suffix: &'static str,
    (il, half): (LayerId, usize),
    tensor: &CacheTensor,
    [width, rows]: [usize; 2],
) -> Source<'a> {
    Source::Buffer {
        name,
        suffix,
        buffer_id: KvCache::buffer_id(il, half),
        address: tensor.words.address(),
        size_bytes: (rows * tensor.row_size()) as u64,
        ne: [width as u64, rows as u64],
        dtype: tensor.ty().name(),
    }
}
