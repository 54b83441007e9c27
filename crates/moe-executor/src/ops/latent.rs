//! Operations of multi-head latent attention.
//!
//! ggml computes the parts of heads in views and joins them with concatenations. Here an operation writes its part of each head to the
//! place where the concatenation would copy it, so that less is copied. On a GPU, one operation computes both parts, and the others are only
//! recorded.

use crate::activation::{Activation, NodeName};
use crate::buffers::Input;
use crate::cpu::heads::{self, Part};
use crate::cpu::{matmul, rope};
use crate::hparams::Rope;
use crate::ops::elementwise::input;
use crate::ops::{Ops, number};
use crate::recorder::Source;
use crate::weights::Matrix;

/// Heads that consist of a start and an end: parts of two activations.
pub(crate) struct Join<'a> {
    /// The first elements of each head.
    pub starts: (&'a mut Activation, Part),
    /// The elements after them.
    pub ends: (&'a mut Activation, Part),
    /// Number of heads.
    pub n_head: usize,
}

impl Join<'_> {
    /// The places of starts and ends in the result.
    fn places(&self) -> [Part; 2] {
        let (n_start, n_end) = (self.starts.1.n, self.ends.1.n);
        let place = |first, n| Part {
            first,
            n,
            stride: n_start + n_end,
        };
        [place(0, n_start), place(n_start, n_end)]
    }
}

impl Ops<'_> {
    /// The product of each head of `src (token, n_head * n_in)` with its matrix: `dst (token, n_head * n_out)`. Also records the copy with
    /// which ggml makes a permuted view of the result contiguous; its rows are contiguous.
    pub fn head_products(
        &mut self,
        name: NodeName,
        weights: &Matrix,
        src: &mut Activation,
        dst: &mut Activation,
    ) {
        let mut scope = self.start();
        dst.shape(name, weights.n_expert * weights.n_out, src.rows);
        let device = self.device_of(weights, src.rows);
        let done = self.on(&mut scope, device, |gpu| {
            gpu.head_products(weights, src, dst)
        });
        if !done {
            self.fetch(&mut src.values);
            let widths = [weights.n_in, weights.n_out];
            self.multiply_heads(weights, src, dst, widths);
        }
        let sources = [weights.into(), Source::view(&*src, " (permuted)")];
        self.record(&mut scope, number::MUL_MAT, name, &sources);
        let product = Source::view(&*dst, " (permuted)");
        self.record(&mut scope, number::CONT, name.permuted_copy(), &[product]);
    }

    /// The queries of compressed rows: the product of the start of each head of `src` with its matrix, then the last `rope.n_dims` elements of
    /// the head after RoPE. The heads of `src` have `head_dim` elements; `dst (token, n_head * (n_out + rope.n_dims))`. The names are those of
    /// the product, the rotated elements and their concatenation.
    pub fn absorbed_queries(
        &mut self,
        [product, rotated, joined]: [NodeName; 3],
        weights: &Matrix,
        rope: &Rope,
        (src, head_dim): (&mut Activation, usize),
        dst: &mut Activation,
    ) {
        let mut scope = self.start();
        let (n_head, rank, n_rot) = (weights.n_expert, weights.n_out, rope.n_dims);
        dst.shape(product, n_head * (rank + n_rot), src.rows);
        let ends = Part {
            first: head_dim - n_rot,
            n: n_rot,
            stride: head_dim,
        };
        let device = self.device_of(weights, src.rows);
        let mut angles = std::mem::take(&mut self.angles);
        let values = angles.of(self.threads, rope, None, &self.positions);
        let done = self.on(&mut scope, device, |gpu| {
            gpu.absorbed_queries(weights, Some((rope, values)), (&mut *src, ends), dst)
        });
        self.angles = angles;
        if !done {
            self.fetch(&mut src.values);
            self.multiply_heads(weights, src, dst, [head_dim, rank + n_rot]);
        }
        let starts = Source::part(dst, n_head * rank);
        let sources = [weights.into(), (&*src).into()];
        self.record(&mut scope, number::MUL_MAT, product, &sources);
        if !done {
            let to = Part {
                first: rank,
                n: n_rot,
                stride: rank + n_rot,
            };
            self.copy_part(Some(rope), (&*src, ends), dst, to);
        }
        let positions = input(Input::Positions, "inp_pos", &self.positions);
        dst.name = rotated;
        self.record(
            &mut scope,
            number::ROPE,
            rotated,
            &[(&*src).into(), positions],
        );
        let ends = Source::part(dst, n_head * n_rot);
        dst.name = joined;
        self.record(&mut scope, number::CONCAT, joined, &[starts, ends]);
    }

    /// Applies RoPE to the last `rope.n_dims` elements of each head of `width` elements, in place.
    pub fn rope_ends(&mut self, name: NodeName, rope: &Rope, width: usize, x: &mut Activation) {
        let mut scope = self.start();
        let before = Source::from(&*x);
        let n = rope.n_dims;
        let device = x.values.home();
        let mut angles = std::mem::take(&mut self.angles);
        let values = angles.of(self.threads, rope, None, &self.positions);
        let done = self.on(&mut scope, device, |gpu| {
            gpu.rope_ends(rope, values, width, x)
        });
        if !done {
            self.fetch(&mut x.values);
            let values = values.host();
            let row_width = x.width;
            self.threads.rows(x.data_mut(), row_width, |i, row| {
                let angles = &values[i * n..][..n];
                for head in row.chunks_exact_mut(width) {
                    rope::rotate(rope.layout, &mut head[width - n..], angles);
                }
            });
        }
        self.angles = angles;
        x.name = name;
        let positions = input(Input::Positions, "inp_pos", &self.positions);
        self.record(&mut scope, number::ROPE, name, &[before, positions]);
    }

    /// The last `rope.n_dims` elements of each row of `src` after RoPE, `dst (token, rope.n_dims)`.
    pub fn rope_end_of_rows(
        &mut self,
        name: NodeName,
        rope: &Rope,
        src: &mut Activation,
        dst: &mut Activation,
    ) {
        let mut scope = self.start();
        let n = rope.n_dims;
        dst.shape(name, n, src.rows);
        let from = Part {
            first: src.width - n,
            n,
            stride: 0,
        };
        let device = src.values.home();
        let mut angles = std::mem::take(&mut self.angles);
        let values = angles.of(self.threads, rope, None, &self.positions);
        let done = self.on(&mut scope, device, |gpu| {
            gpu.copy_of_heads(Some((rope, values)), (&mut *src, from), 1, dst)
        });
        self.angles = angles;
        if !done {
            self.fetch(&mut src.values);
            let to = Part {
                first: 0,
                n,
                stride: n,
            };
            self.copy_part(Some(rope), (&*src, from), dst, to);
        }
        let positions = input(Input::Positions, "inp_pos", &self.positions);
        let sources = [(&*src).into(), positions];
        self.record(&mut scope, number::ROPE, name, &sources);
    }

    /// Joins the starts and the ends of heads to `dst (token, n_head * head)`, which it shapes. The ends are rotated with `rope`; without it, they
    /// are those of all heads, and ggml repeats them. The names are those of the ends and of the concatenation.
    pub fn join_heads(
        &mut self,
        [ends_name, name]: [NodeName; 2],
        rope: Option<&Rope>,
        mut join: Join,
        dst: &mut Activation,
    ) {
        let mut scope = self.start();
        let places = join.places();
        let n_ends = join.n_head * join.ends.1.n;
        dst.shape(
            ends_name,
            join.n_head * places[0].stride,
            join.starts.0.rows,
        );
        let device = join.starts.0.values.home();
        let mut angles = std::mem::take(&mut self.angles);
        let values = rope.map(|rope| {
            let values = angles.of(self.threads, rope, None, &self.positions);
            (rope, values)
        });
        let done = self.on(&mut scope, device, |gpu| {
            gpu.join_heads(values, &mut join, dst)
        });
        self.angles = angles;
        let Join { starts, ends, .. } = join;
        if !done {
            self.fetch(&mut ends.0.values);
            self.copy_part(rope, (&*ends.0, ends.1), dst, places[1]);
        }
        let positions = input(Input::Positions, "inp_pos", &self.positions);
        let source = Source::from(&*ends.0);
        match rope {
            Some(_) => self.record(&mut scope, number::ROPE, ends_name, &[source, positions]),
            None => self.record(&mut scope, number::REPEAT, ends_name, &[source]),
        }
        let sources = [(&*starts.0).into(), Source::part(dst, n_ends)];
        if !done {
            self.fetch(&mut starts.0.values);
            self.copy_part(None, (&*starts.0, starts.1), dst, places[0]);
        }
        dst.name = name;
        self.record(&mut scope, number::CONCAT, name, &sources);
    }

    /// Copies a part of each of `n_head` heads of `src` to `dst (token, n_head * part.n)`.
    pub fn copy_of_heads(
        &mut self,
        name: NodeName,
        (src, part): (&mut Activation, Part),
        n_head: usize,
        dst: &mut Activation,
    ) {
        let mut scope = self.start();
        dst.shape(name, n_head * part.n, src.rows);
        let device = src.values.home();
        let done = self.on(&mut scope, device, |gpu| {
            gpu.copy_of_heads(None, (&mut *src, part), n_head, dst)
        });
        if !done {
            self.fetch(&mut src.values);
            let to = Part {
                first: 0,
                n: part.n,
                stride: part.n,
            };
            self.copy_part(None, (&*src, part), dst, to);
        }
        self.record(&mut scope, number::CONT, name, &[(&*src).into()]);
    }

    /// The products of heads on the CPU. A head has the first of `widths` elements in `src` and the second in `dst`.
    fn multiply_heads(
        &mut self,
        weights: &Matrix,
        src: &Activation,
        dst: &mut Activation,
        widths: [usize; 2],
    ) {
        let scratch = &mut self.quantized;
        matmul::mul_mat_heads(
            self.threads,
            weights,
            src.data(),
            dst.data_mut(),
            widths,
            scratch,
        );
    }

    /// Copies parts of heads on the CPU, and rotates the copies.
    fn copy_part(
        &mut self,
        rope: Option<&Rope>,
        (src, from): (&Activation, Part),
        dst: &mut Activation,
        to: Part,
    ) {
        let mut angles = std::mem::take(&mut self.angles);
        let values = rope.map(|rope| {
            let values = angles.of(self.threads, rope, None, &self.positions);
            (rope, values.host())
        });
        let src = (src.data(), src.width);
        let dst_width = dst.width;
        let dst = (dst.data_mut(), dst_width);
        heads::copy(self.threads, src, from, dst, to, |i, part| {
            if let Some((rope, angles)) = values {
                let n = rope.n_dims;
                rope::rotate(rope.layout, part, &angles[i * n..][..n]);
            }
        });
        self.angles = angles;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::threads::Threads;
    use crate::devices::Devices;
    use crate::hparams::RopeLayout;
    use crate::recorder::Recorder;

    const NAME: &str = "x";

    fn ops<'a>(threads: &'a Threads, positions: &[u32]) -> Ops<'a> {
        let mut ops = Ops::new(threads, Recorder::new(None), Devices::cpu());
        ops.positions.extend(positions);
        ops
    }

    /// An activation `(rows, width)` with the values 0, 1, 2, …
    fn counting(width: usize, rows: usize) -> Activation {
        let mut x = Activation::new(1);
        x.shape(NodeName::global(NAME), width, rows);
        let values = x.data_mut().iter_mut().enumerate();
        values.for_each(|(i, value)| *value = i as f32);
        x
    }

    fn rope() -> Rope {
        Rope {
            n_dims: 4,
            layout: RopeLayout::Neighbours,
            freq_base: 100.0,
            freq_scale: 1.0,
            ext_factor: 0.0,
            attn_factor: 1.0,
            n_ctx_orig: 64,
            beta: (32.0, 1.0),
        }
    }

    /// The last four elements of a head at a position, rotated in f64: the pairs turn by 1 and 0.1 radians per position.
    fn rotated(end: &[f32], position: u32) -> Vec<f64> {
        let pairs = end.chunks_exact(2).zip([1.0, 0.1]);
        let turned = pairs.flat_map(|(pair, speed)| {
            let (sin, cos) = (f64::from(position) * speed).sin_cos();
            let [a, b] = [pair[0], pair[1]].map(f64::from);
            [a * cos - b * sin, a * sin + b * cos]
        });
        turned.collect()
    }

    #[track_caller]
    fn near(got: &[f32], want: &[f64]) {
        assert_eq!(got.len(), want.len());
        for (got, want) in got.iter().zip(want) {
            assert!((f64::from(*got) - want).abs() < 1e-5, "{got} {want}");
        }
    }

    #[test]
    fn rotates_the_ends_of_heads_only() {
        let threads = Threads::new(2).unwrap();
        let mut ops = ops(&threads, &[3, 8]);
        let name = NodeName::global(NAME);
        // Two tokens with three heads of seven elements.
        let before = counting(21, 2);
        let mut x = counting(21, 2);
        ops.rope_ends(name, &rope(), 7, &mut x);
        let mut src = counting(21, 2);
        let mut copy = Activation::new(2);
        ops.rope_end_of_rows(name, &rope(), &mut src, &mut copy);
        for (i, head) in before.data().chunks_exact(7).enumerate() {
            let want = rotated(&head[3..], [3, 8][i / 3]);
            let got = &x.data()[i * 7..][..7];
            assert_eq!(got[..3], head[..3]);
            near(&got[3..], &want);
            if i % 3 == 2 {
                near(&copy.data()[i / 3 * 4..][..4], &want);
            }
        }
    }

    fn part(of: std::ops::Range<usize>, stride: usize) -> Part {
        Part {
            first: of.start,
            n: of.len(),
            stride,
        }
    }

    #[test]
    fn joins_starts_and_ends_of_heads() {
        let threads = Threads::new(2).unwrap();
        let mut ops = ops(&threads, &[3, 8]);
        let names = [NodeName::global(NAME); 2];
        // Two tokens with two heads: three elements of `starts`, then the two elements of the row of `ends`.
        let (mut starts, mut ends) = (counting(8, 2), counting(2, 2));
        let mut heads = Activation::new(2);
        let join = Join {
            starts: (&mut starts, part(0..3, 4)),
            ends: (&mut ends, part(0..2, 0)),
            n_head: 2,
        };
        ops.join_heads(names, None, join, &mut heads);
        let want: [[f32; 5]; 4] = [
            [0.0, 1.0, 2.0, 0.0, 1.0],
            [4.0, 5.0, 6.0, 0.0, 1.0],
            [8.0, 9.0, 10.0, 2.0, 3.0],
            [12.0, 13.0, 14.0, 2.0, 3.0],
        ];
        assert_eq!(heads.data(), want.as_flattened());
        // The ends are rotated: elements 1 to 5 of heads of six.
        let mut ends = counting(12, 2);
        let join = Join {
            starts: (&mut starts, part(1..2, 4)),
            ends: (&mut ends, part(1..5, 6)),
            n_head: 2,
        };
        ops.join_heads(names, Some(&rope()), join, &mut heads);
        for (i, head) in heads.data().chunks_exact(5).enumerate() {
            assert_eq!(head[0], (4 * i + 1) as f32);
            near(
                &head[1..],
                &rotated(&ends.data()[6 * i + 1..][..4], [3, 8][i / 2]),
            );
        }
    }

    #[test]
    fn copies_columns_of_heads() {
        let threads = Threads::new(2).unwrap();
        let mut ops = ops(&threads, &[0, 1]);
        let (mut src, mut dst) = (counting(8, 2), Activation::new(2));
        let name = NodeName::global(NAME);
        ops.copy_of_heads(name, (&mut src, part(1..3, 4)), 2, &mut dst);
        assert_eq!((dst.width, dst.rows), (4, 2));
        assert_eq!(dst.data(), [1.0, 2.0, 5.0, 6.0, 9.0, 10.0, 13.0, 14.0]);
    }
}
