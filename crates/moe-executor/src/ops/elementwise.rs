//! Operations that work row by row: norms, sums, look-ups.

use crate::activation::{Activation, NodeName};
use crate::cpu::quant::dequantize_row;
use crate::ops::{Ops, number};
use crate::recorder::Source;
use crate::weights::{Matrix, Vector};

impl Ops<'_> {
    /// Rows of the embedding matrix. `inp_tokens` is the buffer of the token ids.
    pub fn get_embeddings(
        &mut self,
        name: NodeName,
        weights: &Matrix,
        tokens: &[u32],
        dst: &mut Activation,
    ) {
        let start = self.recorder.start();
        dst.shape(name, weights.n_in, tokens.len());
        self.threads.rows(dst.data_mut(), weights.n_in, |i, out| {
            let token = tokens[i] as usize;
            dequantize_row(weights.ty, weights.rows(0, token..token + 1), out)
                .expect("the matrix has a kernel, so its type can be read");
        });
        let ids = input("inp_tokens", tokens);
        self.record(start, number::GET_ROWS, name, &[weights.into(), ids]);
    }

    /// The rows `rows` of `src`; the positions of the operations that follow are cut alike by the caller.
    pub fn get_rows(
        &mut self,
        name: NodeName,
        src: &Activation,
        rows: &[u32],
        dst: &mut Activation,
    ) {
        let start = self.recorder.start();
        dst.shape(name, src.width, rows.len());
        for (&row, out) in rows.iter().zip(dst.data_mut().chunks_exact_mut(src.width)) {
            out.copy_from_slice(src.row(row as usize));
        }
        self.record(
            start,
            number::GET_ROWS,
            name,
            &[src.into(), input("out_ids", rows)],
        );
    }

    /// `x / sqrt(mean(x²) + eps)` over every `width` elements ("Root Mean Square Layer Normalization", Zhang and
    /// Sennrich, 2019), then times `weight` as an operation of its own.
    pub fn rms_norm(
        &mut self,
        norm: NodeName,
        name: NodeName,
        src: &Activation,
        weight: &Vector,
        eps: f32,
        dst: &mut Activation,
    ) {
        let start = self.recorder.start();
        let width = weight.n;
        dst.shape(norm, src.width, src.rows);
        self.threads
            .zip_rows(src.data(), width, dst.data_mut(), width, |x, out| {
                let mean = sum_of_squares(x) / width as f64;
                let scale = 1.0 / (mean as f32 + eps).sqrt();
                out.iter_mut().zip(x).for_each(|(o, x)| *o = x * scale);
            });
        self.record(start, number::RMS_NORM, norm, &[src.into()]);

        let start = self.recorder.start();
        let normed = Source::from(&*dst);
        self.threads.rows(dst.data_mut(), width, |_, row| {
            row.iter_mut().zip(&weight.data).for_each(|(x, w)| *x *= w);
        });
        dst.name = name;
        self.record(start, number::MUL, name, &[normed, weight.into()]);
    }

    /// Adds `bias` to every row, in place.
    pub fn add_bias(&mut self, name: NodeName, bias: &Vector, x: &mut Activation) {
        let start = self.recorder.start();
        let before = Source::from(&*x);
        self.threads.rows(x.data_mut(), bias.n, |_, row| {
            row.iter_mut().zip(&bias.data).for_each(|(x, b)| *x += b);
        });
        x.name = name;
        self.record(start, number::ADD, name, &[before, bias.into()]);
    }

    /// `dst = sigmoid(x)` the way llama.cpp's graph does it: `silu(x) / x`.
    pub fn sigmoid(&mut self, [silu, name]: [NodeName; 2], x: &Activation, dst: &mut Activation) {
        let start = self.recorder.start();
        dst.shape(silu, x.width, x.rows);
        for (out, x) in dst.data_mut().iter_mut().zip(x.data()) {
            *out = x / (1.0 + (-x).exp());
        }
        self.record(start, number::UNARY, silu, &[x.into()]);

        let start = self.recorder.start();
        let before = Source::from(&*dst);
        for (out, x) in dst.data_mut().iter_mut().zip(x.data()) {
            *out = if *x == 0.0 { 0.5 } else { *out / x };
        }
        dst.name = name;
        self.record(start, number::DIV, name, &[before, x.into()]);
    }

    /// Multiplies every row of `x` by its own `weight (row, 1)`, in place.
    pub fn scale_rows(&mut self, name: NodeName, weight: &Activation, x: &mut Activation) {
        let start = self.recorder.start();
        let before = Source::from(&*x);
        let width = x.width;
        for (row, w) in x.data_mut().chunks_exact_mut(width).zip(weight.data()) {
            row.iter_mut().for_each(|x| *x *= w);
        }
        x.name = name;
        self.record(start, number::MUL, name, &[before, weight.into()]);
    }

    /// `dst = a + b`.
    pub fn add(&mut self, name: NodeName, a: &Activation, b: &Activation, dst: &mut Activation) {
        let start = self.recorder.start();
        dst.shape(name, a.width, a.rows);
        for ((out, a), b) in dst.data_mut().iter_mut().zip(a.data()).zip(b.data()) {
            *out = a + b;
        }
        self.record(start, number::ADD, name, &[a.into(), b.into()]);
    }
}

/// In lanes that do not wait for each other.
fn sum_of_squares(x: &[f32]) -> f64 {
    let (chunks, rest) = x.as_chunks::<16>();
    let mut lanes = [0.0f64; 16];
    for chunk in chunks {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *lane += f64::from(x * x);
        }
    }
    let rest = rest.iter().map(|&x| f64::from(x * x));
    lanes.into_iter().chain(rest).sum()
}

/// Integers that the caller of the graph supplies: token ids, positions, row numbers. Each kind has a buffer id of its
/// own, behind those of the activations.
pub(super) fn input<'a>(stem: &'static str, values: &[u32]) -> Source<'a> {
    const INPUTS: [&str; 5] = [
        "inp_tokens",
        "inp_pos",
        "out_ids",
        "attn_inp_k_idxs",
        "attn_inp_v_idxs",
    ];
    let kind = INPUTS.iter().position(|&input| input == stem);
    Source::Buffer {
        name: NodeName::global(stem),
        suffix: "",
        buffer_id: FIRST_INPUT_BUFFER + kind.unwrap_or(INPUTS.len()) as u64,
        address: values.as_ptr() as u64,
        size_bytes: std::mem::size_of_val(values) as u64,
        ne: [values.len() as u64, 1],
        dtype: "i32",
    }
}

const FIRST_INPUT_BUFFER: u64 = 1 << 12;
