//! Operations of multi-head latent attention.

use crate::activation::Activation;
use crate::cpu::heads::Part;
use crate::cuda::launch::{HeadPart, JoinHeads, Kernels, MulMatId};
use crate::cuda::{Device, Ptr, Result, Scratch};
use crate::hparams::{Rope, RopeLayout};
use crate::mirrored::Mirrored;
use crate::ops::Join;
use crate::weights::Matrix;

/// RoPE, and the angles of each row `(row, n_dims)`.
type Angles<'a> = (&'a Rope, &'a mut Mirrored<f32>);

impl Device {
    /// The product of each head of `src (row, n_head * n_in)` with its matrix: `dst (row, n_head * n_out)`.
    pub(crate) fn head_products(
        &mut self,
        weights: &Matrix,
        src: &mut Activation,
        dst: &mut Activation,
    ) -> Result<()> {
        let x = src.values.device(self.gpu())?;
        let out = dst.values.fill_device(self.gpu())?;
        self.multiply_heads(weights, x, src.rows, out)
    }

    /// Heads of `dst` that consist of the product of the start of a head of `src` with its matrix, and of the part `ends` of that head, which
    /// it rotates.
    pub(crate) fn absorbed_queries(
        &mut self,
        weights: &Matrix,
        rope: Option<Angles>,
        (src, ends): (&mut Activation, Part),
        dst: &mut Activation,
    ) -> Result<()> {
        let (n_head, n_in, n_out, rows) = (weights.n_expert, weights.n_in, weights.n_out, src.rows);
        let bytes = |width: usize| rows * n_head * width * size_of::<f32>();
        let (angles, layout) = self.angles(rope)?;
        let x = src.values.device(self.gpu())?;
        let inputs = self.scratch(Scratch::HeadInputs, bytes(n_in))?;
        let products = self.scratch(Scratch::HeadProducts, bytes(n_out))?;
        let out = dst.values.fill_device(self.gpu())?;
        let starts = Part {
            first: 0,
            n: n_in,
            stride: ends.stride,
        };
        let copy = JoinHeads {
            starts: part(x, src.width, starts),
            ends: HeadPart::EMPTY,
            angles: Ptr::NULL,
            layout,
            rows,
            n_head,
            out: inputs,
        };
        self.kernels().join_heads(self.stream(), &copy)?;
        self.multiply_heads(weights, inputs, rows, products)?;
        let joined = JoinHeads {
            starts: HeadPart {
                at: products,
                n: n_out,
                row: n_head * n_out,
                head: n_out,
            },
            ends: part(x, src.width, ends),
            angles,
            out,
            ..copy
        };
        self.kernels().join_heads(self.stream(), &joined)
    }

    /// Applies RoPE to the last elements of each head of `head_dim` elements, in place.
    pub(crate) fn rope_ends(
        &mut self,
        rope: &Rope,
        angles: &mut Mirrored<f32>,
        head_dim: usize,
        x: &mut Activation,
    ) -> Result<()> {
        self.rope_from(head_dim - rope.n_dims, rope, angles, head_dim, x)
    }

    /// Joins the starts and ends of heads, and rotates the ends.
    pub(crate) fn join_heads(
        &mut self,
        rope: Option<Angles>,
        join: &mut Join,
        dst: &mut Activation,
    ) -> Result<()> {
        let (angles, layout) = self.angles(rope)?;
        let (starts, ends) = (&mut join.starts, &mut join.ends);
        let [x, y] = [&mut starts.0.values, &mut ends.0.values];
        let (x, y) = (x.device(self.gpu())?, y.device(self.gpu())?);
        let joined = JoinHeads {
            starts: part(x, starts.0.width, starts.1),
            ends: part(y, ends.0.width, ends.1),
            angles,
            layout,
            rows: dst.rows,
            n_head: join.n_head,
            out: dst.values.fill_device(self.gpu())?,
        };
        self.kernels().join_heads(self.stream(), &joined)
    }

    /// Copies a part of each of `n_head` heads of `src` to `dst (row, n_head * part.n)`, and rotates the copies.
    pub(crate) fn copy_of_heads(
        &mut self,
        rope: Option<Angles>,
        (src, of): (&mut Activation, Part),
        n_head: usize,
        dst: &mut Activation,
    ) -> Result<()> {
        let (angles, layout) = self.angles(rope)?;
        let x = src.values.device(self.gpu())?;
        let copy = JoinHeads {
            starts: HeadPart::EMPTY,
            ends: part(x, src.width, of),
            angles,
            layout,
            rows: src.rows,
            n_head,
            out: dst.values.fill_device(self.gpu())?,
        };
        self.kernels().join_heads(self.stream(), &copy)
    }

    /// The angles on the GPU, or null, and which elements form pairs.
    fn angles(&self, rope: Option<Angles>) -> Result<(Ptr, RopeLayout)> {
        match rope {
            Some((rope, angles)) => Ok((angles.device(self.gpu())?, rope.layout)),
            None => Ok((Ptr::NULL, RopeLayout::Halves)),
        }
    }

    /// `out (rows, n_head, n_out)`: the product of each head of `x (rows, n_head, n_in)` with its matrix.
    fn multiply_heads(&mut self, weights: &Matrix, x: Ptr, rows: usize, out: Ptr) -> Result<()> {
        let n_head = weights.n_expert;
        let work = Kernels::work_size(rows, n_head, n_head);
        let product = MulMatId {
            weights: self.matrix_or_copy(weights)?,
            bias: Ptr::NULL,
            x: x.into(),
            rows_per: 1,
            ids: self.head_numbers(n_head, rows)?,
            tokens: rows,
            k: n_head,
            n_expert: n_head,
            out,
            scratch: self.quantized(rows * n_head, weights.n_in)?,
            work: self.scratch(Scratch::Worklist, work)?,
        };
        self.kernels().mul_mat_id(self.stream(), &product)
    }
}

/// A part of each head of the rows of `width` elements at `x`.
fn part(x: Ptr, width: usize, of: Part) -> HeadPart {
    HeadPart {
        at: x.offset(of.first * size_of::<f32>()),
        n: of.n,
        row: width,
        head: of.stride,
    }
}
