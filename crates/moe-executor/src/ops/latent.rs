//! Operations of multi-head latent attention. No GPU has kernels for them.
//!
//! ggml computes the parts of heads in views and joins them with concatenations. Here an operation writes its part of each head to the
//! place where the concatenation would copy it, so that less is copied. The caller sets the shape of such a result before.

use std::ops::Range;

use crate::activation::{Activation, NodeName};
use crate::buffers::Input;
use crate::cpu::{matmul, rope};
use crate::hparams::Rope;
use crate::ops::elementwise::input;
use crate::ops::{Ops, number};
use crate::recorder::Source;
use crate::weights::Matrix;

impl Ops<'_> {
    /// The product of each head of `src` with its matrix: the first `n_in` elements of a head of `widths[0]` elements, and the first
    /// `n_out` elements of a head of `dst`, which has `widths[1]` elements. `suffix` is that of the view of `src` in ggml.
    pub fn head_products(
        &mut self,
        name: NodeName,
        weights: &Matrix,
        (src, suffix): (&mut Activation, &'static str),
        dst: &mut Activation,
        widths: [usize; 2],
    ) {
        let mut scope = self.start();
        dst.shape(name, weights.n_expert * widths[1], src.rows);
        self.fetch(&mut src.values);
        matmul::mul_mat_heads(
            self.threads,
            weights,
            src.data(),
            dst.data_mut(),
            widths,
            &mut self.quantized,
        );
        let sources = [weights.into(), Source::view(&*src, suffix)];
        self.record(&mut scope, number::MUL_MAT, name, &sources);
    }

    /// Applies RoPE to the last `rope.n_dims` elements of each head of `width` elements, in place.
    pub fn rope_ends(&mut self, name: NodeName, rope: &Rope, width: usize, x: &mut Activation) {
        let mut scope = self.start();
        self.fetch(&mut x.values);
        let before = Source::from(&*x);
        let positions = input(Input::Positions, "inp_pos", &self.positions);
        let n = rope.n_dims;
        let mut angles = std::mem::take(&mut self.angles);
        let values = angles.of(self.threads, rope, None, &self.positions).host();
        let row_width = x.width;
        self.threads.rows(x.data_mut(), row_width, |i, row| {
            let angles = &values[i * n..][..n];
            for head in row.chunks_exact_mut(width) {
                rope::rotate(rope.layout, &mut head[width - n..], angles);
            }
        });
        self.angles = angles;
        x.name = name;
        self.record(&mut scope, number::ROPE, name, &[before, positions]);
    }

    /// Copies the last `rope.n_dims` elements of each head of `src` to the end of the same head of `dst`, and applies RoPE to them. The
    /// heads have `widths` elements.
    pub fn rope_ends_of(
        &mut self,
        name: NodeName,
        rope: &Rope,
        [src, dst]: [&mut Activation; 2],
        widths: [usize; 2],
    ) {
        let mut scope = self.start();
        self.fetch(&mut src.values);
        let positions = input(Input::Positions, "inp_pos", &self.positions);
        let n = rope.n_dims;
        let mut angles = std::mem::take(&mut self.angles);
        let values = angles.of(self.threads, rope, None, &self.positions).host();
        let (rows, src_width, dst_width) = (src.data(), src.width, dst.width);
        self.threads.rows(dst.data_mut(), dst_width, |i, out| {
            let angles = &values[i * n..][..n];
            let heads = rows[i * src_width..][..src_width].chunks_exact(widths[0]);
            for (head, out) in heads.zip(out.chunks_exact_mut(widths[1])) {
                let out = &mut out[widths[1] - n..];
                out.copy_from_slice(&head[widths[0] - n..]);
                rope::rotate(rope.layout, out, angles);
            }
        });
        self.angles = angles;
        dst.name = name;
        let sources = [(&*src).into(), positions];
        self.record(&mut scope, number::ROPE, name, &sources);
    }

    /// Copies each row of `src` to the end of each head of `dst`, which has `width` elements.
    pub fn repeat_to_ends(
        &mut self,
        name: NodeName,
        src: &mut Activation,
        dst: &mut Activation,
        width: usize,
    ) {
        let mut scope = self.start();
        self.fetch(&mut src.values);
        let (rows, n, dst_width) = (src.data(), src.width, dst.width);
        self.threads.rows(dst.data_mut(), dst_width, |i, out| {
            let row = &rows[i * n..][..n];
            for head in out.chunks_exact_mut(width) {
                head[width - n..].copy_from_slice(row);
            }
        });
        dst.name = name;
        self.record(&mut scope, number::REPEAT, name, &[(&*src).into()]);
    }

    /// Completes the heads of `dst`, whose ends are in place: copies the first `n` elements of each head of `src` to the start of the
    /// same head of `dst`. The heads have `widths` elements.
    pub fn concat_starts(
        &mut self,
        name: NodeName,
        n: usize,
        [src, dst]: [&mut Activation; 2],
        widths: [usize; 2],
    ) {
        let mut scope = self.start();
        self.fetch(&mut src.values);
        let (rows, src_width, dst_width) = (src.data(), src.width, dst.width);
        let ends = dst_width / widths[1] * (widths[1] - n);
        let sources = [(&*src).into(), Source::part(dst, ends)];
        self.threads.rows(dst.data_mut(), dst_width, |i, out| {
            let heads = rows[i * src_width..][..src_width].chunks_exact(widths[0]);
            for (head, out) in heads.zip(out.chunks_exact_mut(widths[1])) {
                out[..n].copy_from_slice(&head[..n]);
            }
        });
        dst.name = name;
        self.record(&mut scope, number::CONCAT, name, &sources);
    }

    /// Records the concatenation of two parts of `x`, which are in place.
    pub fn joined(&mut self, name: NodeName, parts: [Source; 2], x: &mut Activation) {
        let mut scope = self.start();
        x.name = name;
        self.record(&mut scope, number::CONCAT, name, &parts);
    }

    /// Records the copy with which ggml makes a permuted view of `x` contiguous; the rows of `x` are contiguous.
    pub fn permuted_copy(&mut self, x: &mut Activation) {
        let mut scope = self.start();
        let before = Source::view(&*x, " (permuted)");
        self.record(&mut scope, number::CONT, x.name.permuted_copy(), &[before]);
    }

    /// Copies the elements `columns` of each head of `src`, which has `width` elements, to `dst (token, n_head * columns)`.
    pub fn copy_of_heads(
        &mut self,
        name: NodeName,
        columns: Range<usize>,
        [src, dst]: [&mut Activation; 2],
        width: usize,
    ) {
        let mut scope = self.start();
        self.fetch(&mut src.values);
        let n = columns.len();
        dst.shape(name, src.width / width * n, src.rows);
        let (rows, src_width, dst_width) = (src.data(), src.width, dst.width);
        self.threads.rows(dst.data_mut(), dst_width, |i, out| {
            let heads = rows[i * src_width..][..src_width].chunks_exact(width);
            for (head, out) in heads.zip(out.chunks_exact_mut(n)) {
                out.copy_from_slice(&head[columns.clone()]);
            }
        });
        self.record(&mut scope, number::CONT, name, &[(&*src).into()]);
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
        let mut copy = counting(15, 2);
        let mut src = counting(21, 2);
        ops.rope_ends_of(name, &rope(), [&mut src, &mut copy], [7, 5]);
        for (i, head) in before.data().chunks_exact(7).enumerate() {
            let want = rotated(&head[3..], [3, 8][i / 3]);
            let got = &x.data()[i * 7..][..7];
            assert_eq!(got[..3], head[..3]);
            near(&got[3..], &want);
            let got = &copy.data()[i * 5..][..5];
            assert_eq!(got[0], (i * 5) as f32);
            near(&got[1..], &want);
        }
    }

    #[test]
    fn completes_heads_with_starts_and_ends() {
        let threads = Threads::new(2).unwrap();
        let mut ops = ops(&threads, &[0, 1]);
        let name = NodeName::global(NAME);
        // Two tokens with two heads: three elements of `starts`, then the two elements of the row of `ends`.
        let (mut starts, mut ends) = (counting(8, 2), counting(2, 2));
        let mut heads = counting(10, 2);
        ops.repeat_to_ends(name, &mut ends, &mut heads, 5);
        ops.concat_starts(name, 3, [&mut starts, &mut heads], [4, 5]);
        let want: [[f32; 5]; 4] = [
            [0.0, 1.0, 2.0, 0.0, 1.0],
            [4.0, 5.0, 6.0, 0.0, 1.0],
            [8.0, 9.0, 10.0, 2.0, 3.0],
            [12.0, 13.0, 14.0, 2.0, 3.0],
        ];
        assert_eq!(heads.data(), want.as_flattened());
    }

    #[test]
    fn copies_columns_of_heads() {
        let threads = Threads::new(2).unwrap();
        let mut ops = ops(&threads, &[0, 1]);
        let (mut src, mut dst) = (counting(8, 2), Activation::new(2));
        let name = NodeName::global(NAME);
        ops.copy_of_heads(name, 1..3, [&mut src, &mut dst], 4);
        assert_eq!((dst.width, dst.rows), (4, 2));
        assert_eq!(dst.data(), [1.0, 2.0, 5.0, 6.0, 9.0, 10.0, 13.0, 14.0]);
    }
}
