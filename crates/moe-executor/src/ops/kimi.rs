//! Operations of Kimi Linear: convolutions of queries, keys and values with states of their own, and latent attention without RoPE.

use moe_trace::LayerId;

use crate::activation::{Activation, NodeName};
use crate::cpu::heads::Part;
use crate::cpu::{convolution, matmul};
use crate::kv_cache::KvCache;
use crate::ops::recurrent::convolution_states;
use crate::ops::{Join, Ops, number};
use crate::recorder::Source;
use crate::weights::{Matrix, Vector};

impl Ops<'_> {
    /// Convolves queries, keys and values `(token, width)` over the tokens of their sequences, like [`Ops::convolve`], in three operations
    /// with the same name, and multiplies the results by their sigmoids. `dst (token, 3 width)` has the queries, then keys and values. The
    /// convolution states of the layer are those of the queries `(n_past, width)`, then of keys and values. The names are those of the
    /// convolutions and of the activation.
    pub fn convolve_qkv(
        &mut self,
        (il, [name, silu]): (LayerId, [NodeName; 2]),
        kernels: &[Vector; 3],
        [q, k, v]: [&mut Activation; 3],
        cache: &mut KvCache,
        dst: &mut Activation,
    ) {
        let mut scope = self.start();
        let (width, rows) = (q.width, q.rows);
        dst.shape(name, 3 * width, rows);
        let device = self.at(il).device;
        let (runs, state) = cache.state_mut(il);
        let done = self.on(&mut scope, device, |gpu| {
            let qkv = [&mut *q, &mut *k, &mut *v];
            gpu.convolve_qkv(kernels, qkv, (runs, &mut *state), dst)
        });
        if !done {
            self.fetch(&mut state.convolution);
        }
        let n_state = state.shape().convolution();
        let n_past = n_state / 3;
        for (part, (kernel, x)) in kernels.iter().zip([q, k, v]).enumerate() {
            if !done {
                self.fetch(&mut x.values);
                for run in runs {
                    let of = |width: usize| run.tokens.start * width..run.tokens.end * width;
                    let first = run.sequence * n_state + part * n_past;
                    convolution::convolve_to_columns(
                        self.threads,
                        part * width..(part + 1) * width,
                        &kernel.data,
                        &mut state.convolution.host_mut()[first..][..n_past],
                        &x.data()[of(width)],
                        (&mut dst.data_mut()[of(3 * width)], 3 * width),
                    );
                }
            }
            let states = convolution_states(il, state, runs);
            let sources = [(&*x).into(), kernel.into(), states];
            self.record(&mut scope, number::SSM_CONV, name, &sources);
        }
        if !done {
            return self.silu(silu, dst);
        }
        let before = Source::from(&*dst);
        dst.name = silu;
        self.record(&mut scope, number::UNARY, silu, &[before]);
    }

    /// The queries of compressed rows without RoPE: the product of the first `n_in` elements of each head of `src` with its matrix, then the
    /// `n_end` other elements of the head. `dst (token, n_head * (n_out + n_end))`. The names are those of the product and of the
    /// concatenation.
    pub fn absorbed_plain_queries(
        &mut self,
        [product, name]: [NodeName; 2],
        weights: &Matrix,
        n_end: usize,
        src: &mut Activation,
        dst: &mut Activation,
    ) {
        let mut scope = self.start();
        let (n_head, n_out) = (weights.n_expert, weights.n_out);
        let widths = [weights.n_in + n_end, n_out + n_end];
        dst.shape(product, n_head * widths[1], src.rows);
        let ends = Part {
            first: weights.n_in,
            n: n_end,
            stride: widths[0],
        };
        let device = self.device_of(weights, src.rows);
        let done = self.on(&mut scope, device, |gpu| {
            gpu.absorbed_queries(weights, None, (&mut *src, ends), dst)
        });
        if !done {
            self.fetch(&mut src.values);
            matmul::mul_mat_heads(
                self.threads,
                weights,
                src.data(),
                dst.data_mut(),
                widths,
                &mut self.quantized,
            );
        }
        let sources = [weights.into(), (&*src).into()];
        self.record(&mut scope, number::MUL_MAT, product, &sources);
        let starts = Source::part(dst, n_head * n_out);
        if !done {
            let heads = src.data().chunks_exact(widths[0]);
            for (head, out) in heads.zip(dst.data_mut().chunks_exact_mut(widths[1])) {
                out[n_out..].copy_from_slice(&head[weights.n_in..]);
            }
        }
        dst.name = name;
        let sources = [starts, (&*src).into()];
        self.record(&mut scope, number::CONCAT, name, &sources);
    }

    /// The keys of compressed rows without RoPE: each row of `compressed`, then the last `n_end` elements of the row of `rows`;
    /// `dst (token, compressed.width + n_end)`.
    pub fn plain_keys(
        &mut self,
        name: NodeName,
        n_end: usize,
        [compressed, rows]: [&mut Activation; 2],
        dst: &mut Activation,
    ) {
        let mut scope = self.start();
        let n_start = compressed.width;
        dst.shape(name, n_start + n_end, compressed.rows);
        let part = |first, n| Part {
            first,
            n,
            stride: 0,
        };
        let ends = part(rows.width - n_end, n_end);
        let device = compressed.values.home();
        let done = self.on(&mut scope, device, |gpu| {
            let mut join = Join {
                starts: (&mut *compressed, part(0, n_start)),
                ends: (&mut *rows, ends),
                n_head: 1,
            };
            gpu.join_heads(None, &mut join, dst)
        });
        if !done {
            self.fetch(&mut compressed.values);
            self.fetch(&mut rows.values);
            let parts = compressed.data().chunks_exact(n_start);
            let parts = parts.zip(rows.data().chunks_exact(rows.width));
            let keys = dst.data_mut().chunks_exact_mut(n_start + n_end);
            for (key, (start, row)) in keys.zip(parts) {
                key[..n_start].copy_from_slice(start);
                key[n_start..].copy_from_slice(&row[row.len() - n_end..]);
            }
        }
        let sources = [(&*compressed).into(), Source::view(&*rows, " (view)")];
        self.record(&mut scope, number::CONCAT, name, &sources);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::threads::Threads;
    use crate::devices::Devices;
    use crate::recorder::Recorder;

    #[test]
    fn keys_are_compressed_rows_with_the_ends_of_others() {
        let threads = Threads::new(1).unwrap();
        let mut ops = Ops::new(&threads, Recorder::new(None), Devices::cpu());
        ops.positions.extend([0, 1]);
        let name = NodeName::global("x");
        let counting = |width: usize| {
            let mut x = Activation::new(1);
            x.shape(name, width, 2);
            let values = x.data_mut().iter_mut().enumerate();
            values.for_each(|(i, value)| *value = i as f32);
            x
        };
        let (mut compressed, mut rows) = (counting(2), counting(5));
        let mut keys = Activation::new(2);
        ops.plain_keys(name, 3, [&mut compressed, &mut rows], &mut keys);
        assert_eq!((keys.width, keys.rows), (5, 2));
        let want = [0.0, 1.0, 2.0, 3.0, 4.0, 2.0, 3.0, 7.0, 8.0, 9.0];
        assert_eq!(keys.data(), want);
    }
}
