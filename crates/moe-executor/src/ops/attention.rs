//! RoPE, the store of keys and values into the cache, and attention.

use moe_trace::LayerId;

use crate::activation::{Activation, NodeName};
use crate::buffers::Input;
use crate::cpu::attention::{self, Inputs, Shape};
use crate::cpu::rope;
use crate::hparams::Rope;
use crate::kv_cache::KvCache;
use crate::mirrored::Mirrored;
use crate::ops::elementwise::input;
use crate::ops::{At, Ops, number};
use crate::placement::DeviceId;
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

    /// Stores `k` and `v (token, n_head_kv * head_dim)` at their positions in the cache of a layer.
    pub fn store_kv(
        &mut self,
        At { il, device }: At,
        k: &mut Activation,
        v: &mut Activation,
        cache: &mut KvCache,
    ) {
        let width = cache.width();
        let layer = cache.layer_mut(il);
        let halves = [
            ("cache_k_l", "attn_inp_k_idxs", k, &mut layer.k),
            ("cache_v_l", "attn_inp_v_idxs", v, &mut layer.v),
        ];
        for (at, (stem, idxs, rows, cache)) in halves.into_iter().enumerate() {
            let mut scope = self.start();
            let positions = std::mem::take(&mut self.positions);
            let on_gpu = self.on(&mut scope, device, |gpu| {
                gpu.store_rows(rows, &positions, width, cache)
            });
            self.positions = positions;
            if !on_gpu {
                self.fetch(&mut rows.values);
                self.fetch(cache);
                let cache = cache.host_mut();
                for (row, &position) in rows.data().chunks_exact(width).zip(&self.positions) {
                    let position = position as usize;
                    cache[position * width..(position + 1) * width].copy_from_slice(row);
                }
            }
            let name = NodeName::cache(stem, il);
            let sources = [
                Source::view(&*rows, " (view)"),
                input(Input::Positions, idxs, &self.positions),
                cached(name, "", il, at, cache, [width, rows.rows]),
            ];
            self.record(&mut scope, number::SET_ROWS, name.view(), &sources);
        }
    }

    /// Attention of `q (token, n_head * head_dim)` over the cache of a layer. `sinks (n_head)` are scores without a value.
    pub fn attention(
        &mut self,
        At { il, device }: At,
        shape: &Shape,
        sinks: Option<&Vector>,
        q: &mut Activation,
        cache: &mut KvCache,
        dst: &mut Activation,
    ) {
        let mut scope = self.start();
        let name = NodeName::of("kqv_out", il);
        let width = cache.width();
        dst.shape(name, q.width, q.rows);
        let layer = cache.layer_mut(il);
        let positions = std::mem::take(&mut self.positions);
        let on_gpu = self.on(&mut scope, device, |gpu| {
            gpu.attention(shape, sinks, &positions, q, layer, dst)
        });
        self.positions = positions;
        if !on_gpu {
            self.fetch(&mut q.values);
            self.fetch(&mut layer.k);
            self.fetch(&mut layer.v);
            let inputs = Inputs {
                q: q.data(),
                k: layer.k.host(),
                v: layer.v.host(),
                positions: &self.positions,
                sinks: sinks.map(|s| s.data.as_slice()),
            };
            attention::attention(self.threads, shape, &inputs, dst.data_mut());
        }
        let (first, last) = (
            self.positions.first().copied(),
            self.positions.last().copied(),
        );
        let seen = match (first, last) {
            (Some(first), Some(last)) => {
                shape.visible(last as usize).end - shape.visible(first as usize).start
            }
            _ => 0,
        };
        let view = " (view) (permuted)";
        // The fourth source in ggml is the mask. The executor computes the mask from the positions and reads no memory.
        let mask = Source::Buffer {
            name: NodeName::global("attn_inp_kq_mask"),
            suffix: "",
            buffer_id: MASK_BUFFER,
            address: 0,
            size_bytes: 0,
            ne: [0, 0],
            dtype: "f32",
        };
        let sources = [
            Source::view(&*q, view),
            cached(
                NodeName::cache("cache_k_l", il),
                view,
                il,
                0,
                &layer.k,
                [width, seen],
            ),
            cached(
                NodeName::cache("cache_v_l", il),
                view,
                il,
                1,
                &layer.v,
                [width, seen],
            ),
            mask,
        ];
        let [q, k, v, mask] = sources;
        let sources: &[Source] = match sinks {
            Some(sinks) => &[q, k, v, mask, sinks.into()],
            None => &[q, k, v, mask],
        };
        self.record(&mut scope, number::FLASH_ATTN_EXT, name, sources);
    }
}

/// Buffer id of the mask, which has no memory.
const MASK_BUFFER: u64 = (1 << 16) - 4;

/// The first `rows` rows of a layer's keys (`half` 0) or values (`half` 1) as a source.
fn cached<'a>(
    name: NodeName,
    suffix: &'static str,
    il: LayerId,
    half: usize,
    data: &Mirrored<f32>,
    [width, rows]: [usize; 2],
) -> Source<'a> {
    Source::Buffer {
        name,
        suffix,
        buffer_id: KvCache::buffer_id(il, half),
        address: data.address(),
        size_bytes: (width * rows * size_of::<f32>()) as u64,
        ne: [width as u64, rows as u64],
        dtype: "f32",
    }
}
